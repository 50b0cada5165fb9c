"""What can go wrong in a build. Each failure is a class of its own with a stable slug."""

from __future__ import annotations

from kernel_depot.errors import PROBLEM_NAMESPACE, DepotError


class BuildError(DepotError):
    """The root of the builder's failures."""

    slug = "build-failed"
    title = "The build failed"
    status = 422


class PlanUnreadable(BuildError):
    """A build plan that cannot be opened, or is no TOML."""

    slug = "build-plan-unreadable"
    title = "The build plan cannot be read"
    status = 400


class PlanInvalid(BuildError):
    """A build plan with errors; carries every one of them."""

    slug = "build-plan-invalid"
    title = "The build plan has errors"
    status = 400


class ModuleUriUnknown(BuildError):
    """A module's URI that no family of the source spells."""

    slug = "build-module-unknown"
    title = "No such kernel module"
    status = 400


class ModuleNameDiffers(BuildError):
    """A module that this source knows, under another URI than the plan's."""

    slug = "build-module-name-differs"
    title = "The source gives the module another name"
    status = 400


class SmUnsupported(BuildError):
    """An SM that a module's source, or the toolchain, has no code for."""

    slug = "build-sm-unsupported"
    title = "The module cannot be built for this SM"
    status = 400


class SourceMismatch(BuildError):
    """A source wheel given as a file whose bytes are not those that the plan pins."""

    slug = "build-source-mismatch"
    title = "The source wheel is not the pinned one"


class ToolchainMissing(BuildError):
    """A compiler, header or library that is neither on this machine nor pinned."""

    slug = "build-toolchain-missing"
    title = "The toolchain is not complete"


class GeneratorFailed(BuildError):
    """The source's own generator did not tell how a module is compiled."""

    slug = "build-generator-failed"
    title = "The source's generator failed"


class RecipeUnusable(BuildError):
    """A recipe of the generator that cannot be moved to a private directory."""

    slug = "build-recipe-unusable"
    title = "The generated build rules cannot be used"


class CompileFailed(BuildError):
    """The compiler or the linker refused a module."""

    slug = "build-compile-failed"
    title = "A module does not compile"


class HeaderMissing(CompileFailed):
    """A header that the module's source includes and no directory has."""

    slug = "build-header-missing"
    title = "A header is missing"


class LibraryMissing(CompileFailed):
    """A library that the module is linked against and no directory has."""

    slug = "build-library-missing"
    title = "A library is missing"


class CompilerOutOfMemory(CompileFailed):
    """The compiler went over the plan's memory limit, or the kernel killed it."""

    slug = "build-out-of-memory"
    title = "The compiler ran out of memory"


class CompileTimeout(CompileFailed):
    """A module that took longer than the plan allows."""

    slug = "build-timeout"
    title = "The module took too long"


class BuildDiskFull(BuildError):
    """No room where the build works or writes."""

    slug = "build-disk-full"
    title = "The disk is full"
    status = 507


class ModuleUnusable(BuildError):
    """A compiled module that is not what its recipe promises."""

    slug = "build-module-unusable"
    title = "The compiled module cannot be used"


class MergeRefused(BuildError):
    """A partial result that does not belong to the plan."""

    slug = "build-merge-refused"
    title = "The partial result does not fit the plan"


class ModulesFailed(BuildError):
    """Some modules of a build failed; the others are kept and not compiled again."""

    slug = "build-modules-failed"
    title = "Not every module could be built"


class DepotUnreachable(BuildError):
    """A depot that does not answer, or answers that it cannot serve now."""

    slug = "build-depot-unreachable"
    title = "The depot does not answer"
    status = 503


class DepotRefused(BuildError):
    """What a depot answers a builder when it refuses; `server_type` is the depot's own problem type."""

    slug = "build-depot-refused"
    title = "The depot refuses"
    status = 502

    def says(self, *slugs: str) -> bool:
        """Tell whether the depot's problem is one of these kinds."""
        return str(self.data.get("server_type") or "").removeprefix(PROBLEM_NAMESPACE) in slugs


class PublishFailed(BuildError):
    """A wheel that was uploaded but could not be brought in; no pin set means it."""

    slug = "build-publish-failed"
    title = "The wheel was not published"
    status = 502
