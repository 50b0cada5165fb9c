"""Which cases a module gets: its name says what it computes."""

from __future__ import annotations

from collections.abc import Iterator

from kernel_depot.kernels.errors import InvalidArgument
from kernel_depot.kernels.uri import Release
from kernel_depot.kernels.uri_parameters import (
    AttentionModule,
    Family,
    MlaModule,
    ModuleParameters,
    PlainModule,
    parse_uri,
)
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
    """Yield a module's cases, at least one. Families, which need numpy, are imported when asked for."""
    if isinstance(parameters, MlaModule):
        from kernel_depot.smoke.numerics import mla

        yield from mla.cases(parameters)
    elif isinstance(parameters, AttentionModule):
        from kernel_depot.smoke.numerics import decode, prefill

        yield from {
            Family.SINGLE_PREFILL: prefill.single_cases,
            Family.BATCH_PREFILL: prefill.batch_cases,
            Family.SINGLE_DECODE: decode.single_cases,
            Family.BATCH_DECODE: decode.batch_cases,
        }[parameters.family](parameters)
    else:
        yield from _plain_cases(parameters)


def _plain_cases(module: PlainModule) -> Iterator[Case]:
    from kernel_depot.smoke.numerics import gdn, moe, norm, page

    if module.family is Family.FUSED_MOE:
        yield from moe.cases(module.name)
    else:
        yield from {Family.NORM: norm.cases, Family.PAGE: page.cases, Family.GDN_PREFILL: gdn.cases}[
            module.family
        ]()
