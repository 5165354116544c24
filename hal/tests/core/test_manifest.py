"""Manifests: what a set chose, with a digest, replayable."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import torch_hal as hal

from .helpers import H200, Offer, refuse_long, rms_norm_kernel


@pytest.fixture
def ops() -> hal.OpSet:
    hal.register(
        Offer(
            rms_norm_kernel("choosy", dynamic=refuse_long),
            rms_norm_kernel("absent", requires=hal.Requires("nvidia")),
            rms_norm_kernel("taker", value=5.0, band=hal.Band.PORTABLE),
        ),
        "acme",
    )
    return hal.bind("cpu")


def test_a_manifest_says_for_every_op_which_kernels_may_run_and_why_others_may_not(ops: hal.OpSet) -> None:
    data = json.loads(ops.manifest.to_json())
    assert set(data) == {"digest", "device", "versions", "ops"}
    assert set(data["ops"]) == set(ops)
    assert data["ops"]["rms_norm"] == {
        "chain": [
            {"kernel": "choosy", "plugin": "acme", "version": 1},
            {"kernel": "taker", "plugin": "acme", "version": 1},
        ],
        "refused": {"acme.absent": "made for nvidia, the device is cpu"},
    }
    assert data["device"]["vendor"] == "cpu" and data["versions"]["torch"] == torch.__version__


def test_a_digest_is_stable_over_binds_and_json_and_changes_with_a_choice(ops: hal.OpSet) -> None:
    manifest = ops.manifest
    assert len(manifest.digest) == 64 and int(manifest.digest, 16)
    assert hal.bind("cpu").manifest.digest == manifest.digest
    assert hal.bind("cpu", hal.Policy(validation=False, trace=True)).manifest.digest == manifest.digest
    again = hal.Manifest.from_json(manifest.to_json())
    assert again == manifest and again.digest == manifest.digest
    others = [hal.Policy(deny={"rms_norm": "choosy"}), hal.Policy(require={"rms_norm": "native"})]
    assert len({manifest.digest, *(hal.bind("cpu", policy).manifest.digest for policy in others)}) == 3


def test_a_digest_tells_archs_apart_and_not_two_devices_of_one() -> None:
    digests = [hal.bind(device).manifest.digest for device in (H200, replace(H200, index=1, name="H100"))]
    assert digests[0] == digests[1]
    assert hal.bind(replace(H200, arch="sm_100")).manifest.digest != digests[0]


def test_an_edited_manifest_is_refused(ops: hal.OpSet) -> None:
    data = json.loads(ops.manifest.to_json())
    data["ops"]["rms_norm"]["chain"].pop(0)
    with pytest.raises(ValueError, match="edited"):
        hal.Manifest.from_json(json.dumps(data))


def test_a_pinned_set_replays_the_choices_whatever_else_has_come(
    ops: hal.OpSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = hal.Manifest.from_json(ops.manifest.to_json())
    hal.register(Offer(rms_norm_kernel("newer", band=hal.Band.TUNED)), "aaa")
    monkeypatch.setenv("TORCH_HAL_PREFER", "rms_norm=taker")
    assert hal.bind("cpu").manifest.digest != manifest.digest
    for policy in (None, hal.Policy(prefer={"rms_norm": "native"}, validation=False)):
        pinned = hal.bind("cpu", manifest.pin(policy))
        assert pinned.manifest.digest == manifest.digest
        assert pinned.policy.validation is (policy is None)


def test_a_pinned_set_whose_kernel_has_gone_is_an_error(ops: hal.OpSet) -> None:
    pinned = ops.manifest.pin()
    hal.unregister("acme")
    with pytest.raises(hal.PolicyError, match=r"'acme\.choosy' matches no kernel"):
        hal.bind("cpu", pinned)
