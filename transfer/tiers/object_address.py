"""The address of an object store, as a deployment writes it."""

from dataclasses import dataclass
from urllib.parse import parse_qs, urlsplit

from ..errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectAddress:
    """A parsed address of an object store."""

    bucket: str
    prefix: str
    endpoint: str | None = None
    """``http://host:port`` of a server other than Amazon's."""
    region: str | None = None

    @classmethod
    def parse(cls, url: str) -> "ObjectAddress":
        """Raises ConfigError for what is no such address."""
        parts = urlsplit(url)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        unknown = set(query) - {"endpoint", "region"}
        if parts.scheme != "s3" or not parts.netloc or unknown:
            raise ConfigError(
                f"object store {url!r} is not allowed: s3://bucket/prefix, followed where needed by "
                "?endpoint=http://host:port&region=name"
            )
        if "@" in parts.netloc:
            raise ConfigError(
                "credentials do not belong into the address of an object store: set AWS_ACCESS_KEY_ID and "
                "AWS_SECRET_ACCESS_KEY"
            )
        endpoint = query.get("endpoint")
        if endpoint is not None and urlsplit(endpoint).scheme not in ("http", "https"):
            raise ConfigError(
                f"endpoint = {endpoint!r} is not allowed: it begins with http:// or https://"
            )
        return cls(
            bucket=parts.netloc,
            prefix=parts.path.strip("/"),
            endpoint=endpoint,
            region=query.get("region"),
        )
