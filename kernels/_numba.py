"""numba behind one typed decorator: kernels compile on first use and are kept on disk for the next process.

numba notices a change in the file of a function, not in what the function calls. So compiled code calls into
other files only where their names begin with an underscore, and the folder of the kept code is named after
their text. It lies outside the package, which may be read-only. numba writes a file under a name of its own and
renames it: ranks that start together race for work, not for correctness. Without a place to write, every
process compiles.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core import cgutils, types
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic

from .kept import kept_folder

__all__ = ["Scalar", "cgutils", "compiled", "contiguous", "inner", "intrinsic", "types"]

P = ParamSpec("P")
R = TypeVar("R")

Scalar = Any
"""A number inside compiled code: float32 or an integer, which Python's own types do not tell."""
_NUMBA: Any = numba


def _text_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("_*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


_FOLDER = kept_folder(f"kernels-{_text_digest()}")


def _decorate(
    function: Callable[P, R], signature: tuple[str, ...], **options: bool
) -> Callable[P, R]:
    config = _NUMBA.config
    before = config.CACHE_DIR
    config.CACHE_DIR = str(_FOLDER or "")
    try:
        decorate = _NUMBA.njit(
            list(signature) or None,
            cache=_FOLDER is not None,
            nogil=True,
            error_model="numpy",
            no_cfunc_wrapper=True,
            **options,
        )
        return cast(Callable[P, R], decorate(function))
    finally:
        config.CACHE_DIR = before


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """``function`` as machine code, without the GIL, with IEEE arithmetic in the written order."""
    return _decorate(function, ())


def inner(*signature: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """As ``compiled``, for functions that only compiled code calls; a ``signature`` saves compiling variants."""
    return lambda function: _decorate(function, signature, no_cpython_wrapper=True)


def _contiguous(typing: Any, row: Any) -> Any:
    del typing

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return impl_ret_borrowed(context, builder, signature.return_type, arguments[0])

    return types.Array(row.dtype, 1, "C")(row), generate


contiguous: Any = intrinsic(_contiguous)
"""A row of an array whose rows are apart, in compiled code: known to be contiguous itself, so that loops vectorise."""
