"""headrace: a disaggregated prefill/decode cluster on Ray for DeepSeek-V4.1-Flash and models of its architecture.

The repository root is this package: ``headrace.model`` is the folder ``model``, and so on. Importing it loads nothing.
"""

__version__ = "0.1.0"
