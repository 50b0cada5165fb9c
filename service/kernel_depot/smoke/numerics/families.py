"""Which cases a module gets: its name says what it computes."""

from __future__ import annotations

from collections.abc import Iterator

from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.uri import Release
from kernel_depot.kernels.uri_parameters import Family, ModuleParameters, parse_uri
from kernel_depot.smoke.numerics.case import Case, Skipped


def parameters_of(uri: str, release: Release) -> ModuleParameters:
    """Return what a module's name says. Raise Skipped, with the reason, for a module without cases."""
    parameters = parse_uri(uri)
    if parameters is None:
        raise Skipped("kernel-depot calls no module of this kind, so it has no numeric case")
    try:
        own = parameters.uri(release)
    except InvalidArgument as error:
        raise Skipped(f"kernel-depot does not call it: {error.name} is {error.found}") from error
    if own != uri:
        raise Skipped(f"in release {'.'.join(map(str, release))} kernel-depot calls {own} instead")
    return parameters


def cases_of(parameters: ModuleParameters) -> Iterator[Case]:
    """Yield a module's cases, at least one. Families are imported when they are asked for."""
    family = parameters.family
    if family is Family.NORM:
        from kernel_depot.smoke.numerics import norm

        yield from norm.cases()
    elif family is Family.PAGE:
        from kernel_depot.smoke.numerics import page

        yield from page.cases()
