"""`metadata.json`: what a build says about itself, and the index of a registry.

The required keys are those of stock `kernels`; the `tpu` section is this project's, ignored by stock.
Unknown keys are ignored here too, so that newer builds stay readable.
"""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import InvalidMetadataError
from .layout import LARGEST_DOCUMENT, check_relative_path
from .reference import Reference, check_repo_id


def _check_identifier(value: str) -> str:
    if not value.isidentifier() or keyword.iskeyword(value):
        raise ValueError(f"{value!r} is no Python identifier")
    return value


def _check_specifier(value: str) -> str:
    SpecifierSet(value)
    return value


def _check_distribution(value: str) -> str:
    return canonicalize_name(value, validate=True)


Identifier = Annotated[str, AfterValidator(_check_identifier)]
Distribution = Annotated[str, AfterValidator(_check_distribution)]
Specifier = Annotated[str, AfterValidator(_check_specifier)]
RelativePath = Annotated[str, AfterValidator(check_relative_path)]
RepoId = Annotated[str, AfterValidator(check_repo_id)]
NonEmpty = Annotated[str, Field(min_length=1)]
VersionKey = Annotated[str, Field(pattern=r"^[1-9][0-9]*$")]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
KernelName = Annotated[str, Field(pattern=r"^[a-z][-a-z0-9]*[a-z0-9]$")]


class Model(BaseModel):
    """Base of what is read from JSON and TOML: kebab-case keys, no coercion, immutable."""

    model_config = ConfigDict(
        alias_generator=lambda name: name.replace("_", "-"),
        extra="ignore",
        frozen=True,
        strict=True,
        defer_build=True,
    )


class Op(Model):
    """One torch op of a kernel."""

    dtypes: Sequence[NonEmpty]
    differentiable: bool = False
    constraints: str = ""


class Tpu(Model):
    """The `tpu` section: what a kernel needs, where it runs and what it can be used as.

    `provides` maps an extension point, such as ``transformers.experts``, to the names to register there,
    each with the attribute of the kernel module that implements it.
    """

    requires: Mapping[Distribution, Specifier] = {}
    generations: Sequence[NonEmpty] = ()
    ops: Mapping[Identifier, Op] = {}
    provides: Mapping[NonEmpty, Mapping[NonEmpty, Identifier]] = {}


class Backend(Model):
    """The hardware a build is for."""

    type: NonEmpty


class Digest(Model):
    """The digest of every file of a build but `metadata.json` itself, base64 as stock `kernels` writes it."""

    algorithm: Literal["sha256", "sha512"]
    files: Mapping[RelativePath, NonEmpty]


class KernelDependency(Model):
    """Another kernel, in one version or at one revision."""

    repo_id: RepoId
    version: int | None = None
    revision: str | None = None

    @model_validator(mode="after")
    def _is_pinned(self) -> KernelDependency:
        if not self.reference.pinned:
            raise ValueError(f"{self.repo_id} has neither a 'version' nor a 'revision'")
        return self

    @property
    def reference(self) -> Reference:
        """The kernel as it is asked for."""
        return Reference(self.repo_id, self.version, self.revision)


class Metadata(Model):
    """The parsed `metadata.json` of a build."""

    name: KernelName
    id: Identifier
    version: Annotated[int, Field(ge=0)]
    license: NonEmpty
    python_depends: Sequence[str]
    kernel_depends: Sequence[KernelDependency] = ()
    kernels_minver: str | None = None
    upstream: str | None = None
    source: str | None = None
    backend: Backend
    digest: Digest | None = None
    tpu: Tpu | None = None


class IndexEntry(Model):
    """One released version in a registry: its folder and the SHA-256 (hex) of its `metadata.json`.

    A mirror also lists the SHA-256 of each file of the variant folder: the `metadata.json` of a build that
    comes from elsewhere need not list digests.
    """

    path: RelativePath
    metadata_sha256: Sha256
    files: Mapping[RelativePath, Sha256] | None = None


class Index(Model):
    """`index.json`: the kernels of a registry, by repository and version, and other names for them."""

    aliases: Mapping[RepoId, RepoId] = {}
    kernels: Mapping[RepoId, Mapping[VersionKey, IndexEntry]] = {}

    @model_validator(mode="after")
    def _aliases_lead_to_kernels(self) -> Index:
        for alias, target in self.aliases.items():
            if target not in self.kernels:
                raise ValueError(f"the alias {alias!r} leads to {target!r}, which is not in 'kernels'")
        return self


_MOST_PROBLEMS = 20

ModelT = TypeVar("ModelT", bound=BaseModel)


def parse_json(model: type[ModelT], content: bytes, origin: str) -> ModelT:
    """Reads `content` as a `model`; `origin`, the file it comes from, leads every message.

    Raises:
        InvalidMetadataError: `content` is too large, no JSON or breaks the model, with file, field and value.

    Example:
        >>> parse_json(Backend, b'{"type": "tpu"}', "metadata.json").type
        'tpu'
    """
    if len(content) > LARGEST_DOCUMENT:
        raise InvalidMetadataError(
            f"{origin}: it is larger than {LARGEST_DOCUMENT} bytes, which no kernel needs"
        )
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        raise InvalidMetadataError(_describe(error, origin)) from None


def parse_object(model: type[ModelT], data: dict[str, Any], origin: str) -> ModelT:
    """As `parse_json`, from data that is already decoded."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InvalidMetadataError(_describe(error, origin)) from None


def _describe(error: ValidationError, origin: str) -> str:
    lines = []
    problems = error.errors(include_url=False)
    for problem in problems[:_MOST_PROBLEMS]:
        # "[key]" is pydantic's mark for "the key itself is wrong".
        field = ".".join(str(part) for part in problem["loc"] if part != "[key]")
        message = str(problem.get("ctx", {}).get("error", problem["msg"]))
        if problem["type"] not in ("missing", "value_error", "json_invalid"):
            message += f", got {problem['input']!r:.200}"
        lines.append(f"{origin}: {field + ': ' if field else ''}{message}")
    if more := len(problems) - len(lines):
        lines.append(f"{origin}: and {more} more")
    return "\n".join(lines)
