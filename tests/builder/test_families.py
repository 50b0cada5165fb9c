"""URIs and families: one spelling each way."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_depot.builder.errors import ModuleUriUnknown
from kernel_depot.builder.families import DTYPES, PARAMETRIC, request_family, request_uri

FAMILIES = st.sampled_from(sorted(PARAMETRIC))


@given(FAMILIES, st.data())
def test_a_uri_and_its_parameters_are_the_same_request(name: str, data: st.DataObject) -> None:
    family = PARAMETRIC[name]
    values = {}
    for key, default in family.defaults.items():
        if isinstance(default, bool):
            values[key] = data.draw(st.booleans())
        elif isinstance(default, int):
            values[key] = data.draw(st.integers(0, 512))
        else:
            values[key] = data.draw(st.sampled_from(sorted(DTYPES)))
    uri = family.template.format_map(values)
    read = request_uri(uri)
    [made] = request_family(name, values, where="test")
    assert (read.family, read.parameters, read.call) == (made.family, made.parameters, made.call)
    assert read.uri == uri


def test_endings_choose_backend_and_function() -> None:
    [plain] = request_family("batch_prefill", {"dtype": "bf16"}, where="test")
    uri = PARAMETRIC["batch_prefill"].template.format_map(dict(plain.parameters))
    assert dict(request_uri(f"{uri}_sm90").call.arguments)["backend"] == "fa3"
    equal = request_uri(f"{uri}_kv_stride_equal")
    assert equal.call.function == "modules._gen_batch_prefill_primary_module"
    assert dict(equal.call.arguments) == dict(plain.call.arguments)


def test_lists_make_one_module_for_each_value() -> None:
    found = request_family(
        "single_decode", {"dtype": ["f16", "bf16"], "head_dim": [64, 128], "use_swa": True}, where="test"
    )
    got = {(dict(one.parameters)["dtype_kv"], dict(one.parameters)["head_dim_vo"]) for one in found}
    assert got == set(itertools.product(("f16", "bf16"), (64, 128)))
    assert all(dict(one.call.arguments)["use_sliding_window"] is True for one in found)


@pytest.mark.parametrize(
    ("uri", "near"),
    [
        ("pages", "page"),
        ("gdn_prefill", "gdn_prefill_sm90"),
        ("single_decode_with_kv_cache_dtype_q_f16", "single_decode_with_kv_cache_dtype_q_f16_"),
    ],
)
def test_an_unknown_uri_names_the_nearest(uri: str, near: str) -> None:
    with pytest.raises(ModuleUriUnknown) as caught:
        request_uri(uri)
    assert caught.value.data["nearest"][0].startswith(near)


def test_an_unknown_family_names_the_nearest() -> None:
    with pytest.raises(ModuleUriUnknown) as caught:
        request_family("batch_perfill", {}, where="test")
    assert caught.value.data["nearest"][0] == "batch_prefill"
