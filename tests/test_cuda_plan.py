"""Plans of the CUDA engine: pure functions of shapes and device facts, so every rule is held here without a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator

import pytest
import torch

import sanitize
from msa_ops.contract import BLOCK_SIZE, KVFormat
from msa_ops.engines.cuda import launch, plan
from msa_ops.engines.cuda.plan import (
    MAX_GRID,
    ROW_TILE,
    SHARED_PER_BLOCK,
    ClusterRoom,
    Combine,
    DeviceFacts,
    LaunchPlan,
    Shape,
    Variant,
    choose_variant,
    make_plan,
    typical_room,
)

CAPABILITIES = list(SHARED_PER_BLOCK)
WITHOUT_CLUSTERS = [c for c in CAPABILITIES if c < (9, 0)]
WITH_CLUSTERS = [c for c in CAPABILITIES if c >= (9, 0)]
MULTIPROCESSORS = (1, 16, 84, 132, 188)
TOKENS = (1, 2, 7, 16, 33, 64, 132, 133, 264, 265, 1000, 70_000)
HEADS = ((1, 1), (1, 16), (4, 16), (2, 20), (8, 1), (1, 128))
"""KV heads and query heads of each."""

every_capability = pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"{c[0]}.{c[1]}")


def shape(
    kv_format: KVFormat = KVFormat.FP8, tokens: int = 1, kv_heads: int = 4, group: int = 16, topk: int = 16
) -> Shape:
    return Shape(kv_format, tokens, kv_heads, group, topk)


def shapes() -> Iterator[Shape]:
    for kv_format, tokens, (kv_heads, group), topk, fused in itertools.product(
        KVFormat, TOKENS, HEADS, (1, 2, 16, 33, 4096), (None, True, False)
    ):
        yield dataclasses.replace(shape(kv_format, tokens, kv_heads, group, topk), force_fused=fused)


def usual_room(s: Shape, facts: DeviceFacts) -> ClusterRoom:
    variant = choose_variant(s.kv_format, facts)
    return typical_room(facts, variant) if facts.has_clusters else ()


def planned(s: Shape, facts: DeviceFacts, room: ClusterRoom | None = None) -> LaunchPlan:
    if room is not None:
        return make_plan(s, facts, room)
    return plan.plan_for(s, facts, functools.partial(typical_room, facts))


def tiles(s: Shape, p: LaunchPlan) -> int:
    return s.topk * (BLOCK_SIZE // p.variant.tile)


def slots(facts: DeviceFacts, variant: Variant) -> int:
    return facts.multiprocessors * plan.blocks_per_multiprocessor(variant, facts)


@every_capability
def test_every_plan_can_be_launched(capability: tuple[int, int]) -> None:
    """Memory, grid, cluster and splits of every plan are within the device's limits, whatever the shape."""
    built = set(plan.variants(capability))
    for multiprocessors in MULTIPROCESSORS:
        facts = DeviceFacts.of_capability(capability, multiprocessors)
        for s in shapes():
            p = planned(s, facts)
            assert p.variant in built, "a call may ask for prebuilt variants alone"
            assert p.variant.threads <= 1024
            shared = p.variant.dynamic_bytes(p.combine, p.splits) + p.variant.static_shared_bytes
            assert shared <= facts.shared_per_block, (s, p)
            assert p.variant.dynamic_bytes(p.combine, p.splits) <= p.variant.shared_bytes, (
                "the limit that launch.py asks for"
            )
            assert 1 <= p.splits <= tiles(s, p), "a block without a tile"
            assert p.blocks % p.splits == 0 and 1 <= p.blocks <= min(s.items * p.splits, MAX_GRID)
            assert (p.combine is Combine.NONE) == (p.splits == 1)
            if p.combine is Combine.CLUSTER:
                assert p.splits in p.variant.cluster_sizes and p.splits <= facts.max_cluster
                assert p.blocks == s.items * p.splits, "a cluster serves one item"
            assert p.why


@every_capability
def test_a_persistent_grid_is_resident_at_once(capability: tuple[int, int]) -> None:
    facts = DeviceFacts.of_capability(capability)
    for s in shapes():
        p = planned(s, facts)
        if p.variant in plan.dense_variants(s.kv_format, facts):
            assert p.combine is Combine.NONE and p.blocks == s.items, "one block an item, in turn"
        elif p.combine is Combine.NONE:
            assert p.blocks == min(s.items, slots(facts, p.variant))
        per_block = p.variant.dynamic_bytes(p.combine) + p.variant.static_shared_bytes + plan.SYSTEM_SHARED
        assert plan.blocks_per_multiprocessor(p.variant, facts) * per_block <= facts.shared_per_multiprocessor


@every_capability
def test_variants_are_few_and_have_names_of_their_own(capability: tuple[int, int]) -> None:
    variants = plan.variants(capability)
    assert 0 < len(variants) <= 130
    assert len({v.name for v in variants}) == len(variants) == len({v.defines for v in variants})
    assert {v.kv_format for v in variants} == set(KVFormat)


def test_an_unknown_capability_is_named() -> None:
    with pytest.raises(ValueError, match=r"compute capability must be one of 8\.0, .*12\.1, got 7\.5"):
        plan.variants((7, 5))


@every_capability
@pytest.mark.parametrize("kv_format", KVFormat)
def test_the_usual_variant_is_resident_as_often_as_its_registers_allow(
    capability: tuple[int, int], kv_format: KVFormat
) -> None:
    """Registers are held down for `min_blocks`; less shared memory than that would waste them."""
    facts = DeviceFacts.of_capability(capability)
    variant = choose_variant(kv_format, facts)
    assert plan.blocks_per_multiprocessor(variant, facts) == variant.min_blocks
    roomy = dataclasses.replace(facts, shared_per_block=10**6, shared_per_multiprocessor=10**7)
    best = choose_variant(kv_format, roomy)
    assert best.stages * best.min_blocks >= variant.stages * variant.min_blocks


def test_too_little_shared_memory_is_an_error_and_no_wrong_launch() -> None:
    with pytest.raises(AssertionError, match="no variant"):
        choose_variant(KVFormat.BF16, DeviceFacts((8, 0), 10, 48 << 10, 64 << 10))


@every_capability
def test_plans_are_pure(capability: tuple[int, int]) -> None:
    facts = DeviceFacts.of_capability(capability)
    for s in itertools.islice(shapes(), 0, None, 17):
        rooms = tuple(typical_room(facts, variant) for variant in plan.candidates(s, facts))
        again = make_plan.__wrapped__(dataclasses.replace(s), dataclasses.replace(facts), usual_room(s, facts), rooms)
        assert planned(s, facts) == again


# --- who splits ---


@every_capability
def test_force_fused_gives_every_batch_the_same_arithmetic(capability: tuple[int, int]) -> None:
    """A request's bits may then not depend on what else is in the batch: one block an item, one variant."""
    facts = DeviceFacts.of_capability(capability)
    for kv_format, topk in itertools.product(KVFormat, (1, 16, 4096)):
        plans = [
            planned(dataclasses.replace(shape(kv_format, tokens, topk=topk), force_fused=True), facts)
            for tokens in TOKENS
        ]
        assert {(p.variant, p.combine, p.splits) for p in plans} == {(plans[0].variant, Combine.NONE, 1)}


@pytest.mark.parametrize("capability", WITH_CLUSTERS)
def test_clusters_are_asked_for_only_as_far_as_they_fit(capability: tuple[int, int]) -> None:
    facts = DeviceFacts.of_capability(capability)
    rooms: list[ClusterRoom] = [
        usual_room(shape(), facts),
        ((2, 60), (4, 20), (8, 3), (16, 1)),
        ((2, 60), (4, 0), (8, 5), (16, 0)),
        ((2, 0), (4, 0), (8, 0), (16, 0)),
        (),
    ]
    for room, s in itertools.product(rooms, shapes()):
        p = planned(s, facts, room)
        if p.combine is not Combine.CLUSTER:
            continue
        most = dict(room)[p.splits]
        assert most > 0, "the driver said that no such cluster can be launched"
        if s.force_fused is None:
            assert s.items <= most, "a second wave of clusters costs more than splitting gains"


@pytest.mark.parametrize("capability", WITH_CLUSTERS)
def test_few_items_are_split_and_many_are_not(capability: tuple[int, int]) -> None:
    facts = DeviceFacts.of_capability(capability)
    one = planned(shape(kv_heads=1), facts)
    assert (one.combine, one.splits) == (Combine.CLUSTER, min(16, facts.max_cluster))
    previous = one.splits
    for tokens in range(1, 200):
        p = planned(shape(tokens=tokens, kv_heads=1), facts)
        # But where clusters of two would no longer leave half of the multiprocessors to the next call.
        assert p.splits <= previous or (p.splits, tokens) == (3, facts.multiprocessors // 4 + 1), "never split further"
        previous = p.splits
    assert previous == 1


def test_clusters_between_the_powers_of_two_where_they_were_measured() -> None:
    """Of an H200, by what its driver answers."""
    facts = DeviceFacts.of_capability((9, 0))
    fits = {2: 66, 3: 39, 4: 30, 6: 17, 8: 15, 16: 7}

    def room(variant: Variant) -> plan.ClusterRoom:
        two = plan.blocks_per_multiprocessor(variant, facts) > 1
        return tuple((size, (2 if two else 1) * fits[size]) for size in variant.cluster_sizes)

    def sizes(kv_format: KVFormat) -> dict[int, int]:
        items = (15, 16, 17, 18, 30, 31, 33, 34, 38, 39, 40)
        return {n: plan.plan_for(shape(kv_format, n, kv_heads=1), facts, room).splits for n in items}

    assert sizes(KVFormat.BF16) == {15: 8, 16: 6, 17: 6, 18: 4, 30: 4, 31: 2, 33: 2, 34: 3, 38: 3, 39: 3, 40: 2}
    assert sizes(KVFormat.FP8) == {15: 8, 16: 8, 17: 4, 18: 4, 30: 4, 31: 2, 33: 2, 34: 3, 38: 3, 39: 2, 40: 2}
    assert sizes(KVFormat.NVFP4) == {15: 8, 16: 8, 17: 4, 18: 4, 30: 4, 31: 3, 33: 3, 34: 3, 38: 3, 39: 3, 40: 2}


@pytest.mark.parametrize("capability", WITHOUT_CLUSTERS)
def test_without_clusters_few_items_go_through_scratch(capability: tuple[int, int]) -> None:
    facts = DeviceFacts.of_capability(capability)
    one = planned(shape(kv_heads=1), facts)
    assert (one.combine, one.splits) == (Combine.SCRATCH, 16)
    for tokens in TOKENS:
        s = shape(tokens=tokens)
        p = planned(s, facts)
        assert p.combine in (Combine.NONE, Combine.SCRATCH)
        if s.items >= slots(facts, p.variant):
            assert p.combine is Combine.NONE
        else:
            assert p.blocks <= slots(facts, p.variant), "splits fill the device once"


@every_capability
def test_force_fused_false_splits_as_far_as_the_device_allows(capability: tuple[int, int]) -> None:
    facts = DeviceFacts.of_capability(capability)
    for kv_format, tokens, topk in itertools.product(KVFormat, TOKENS, (1, 2, 3, 16, 100)):
        s = dataclasses.replace(shape(kv_format, tokens, topk=topk), force_fused=False)
        p = planned(s, facts)
        if facts.has_clusters:
            most = max((n for n in (2, 4, 8, 16) if n <= min(topk, facts.max_cluster)), default=1)
        else:
            most = min(topk, 64)
        assert p.splits == most, (s, p)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_a_forced_combine_is_taken(capability: tuple[int, int]) -> None:
    facts = DeviceFacts.of_capability(capability)
    for s in shapes():
        for combine in Combine:
            forced = dataclasses.replace(s, combine=combine)
            if combine is Combine.CLUSTER and not facts.has_clusters:
                with pytest.raises(ValueError, match=r"MSA_OPS_COMBINE=cluster needs compute capability 9\.0"):
                    planned(forced, facts)
                continue
            p = planned(forced, facts)
            # One tile cannot be split.
            assert p.combine is (combine if tiles(s, p) > 1 else Combine.NONE), (forced, p)


def test_scratch_holds_every_partial_row() -> None:
    values, state = plan.scratch_elements(shape(tokens=3, kv_heads=2, group=20), splits=5)
    rows = 3 * 2 * 2 * 5 * ROW_TILE  # a group of 20 takes two row tiles
    assert (values, state) == (rows * 128, rows * 2)


def test_items_count_row_tiles() -> None:
    assert [shape(tokens=5, kv_heads=3, group=g).items for g in (1, 16, 17, 32, 33)] == [15, 15, 30, 30, 45]


# --- what the environment forces ---


def test_forced_values_are_read_and_bad_ones_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, combine in (
        ("", None),
        ("none", Combine.NONE),
        ("Cluster", Combine.CLUSTER),
        ("SCRATCH", Combine.SCRATCH),
    ):
        monkeypatch.setenv("MSA_OPS_COMBINE", text)
        assert launch._forced_combine() is combine
    monkeypatch.setenv("MSA_OPS_COMBINE", "clusters")
    with pytest.raises(ValueError, match="MSA_OPS_COMBINE must be none, cluster or scratch, got 'clusters'"):
        launch._forced_combine()
    monkeypatch.setenv("MSA_OPS_PLAN", "1,4,128,3,2,8,0")
    assert launch._forced_plan() == (1, 4, 128, 3, 2, 8, 0)
    for text in ("1,4,128", "1,4,128,3,2,8,x"):
        monkeypatch.setenv("MSA_OPS_PLAN", text)
        with pytest.raises(ValueError, match=r"MSA_OPS_PLAN must be groups,warps"):
            launch._forced_plan()


def test_a_forced_plan_is_taken_and_a_wrong_grid_refused() -> None:
    facts = DeviceFacts.of_capability((9, 0))
    s = dataclasses.replace(shape(tokens=10), override=(1, 4, 64, 2, 1, 4, 0))
    p = planned(s, facts)
    assert (p.variant.tile, p.combine, p.splits, p.blocks) == (64, Combine.CLUSTER, 4, 160)
    wide = dataclasses.replace(s, override=(1, 4, 64, 2, 1, 3, 0))
    assert (planned(wide, facts).splits, planned(wide, facts).blocks) == (3, 120)
    with pytest.raises(ValueError, match="this variant has one of 2, 4, 8, 16 blocks here, got splits = 3"):
        planned(dataclasses.replace(s, override=(1, 4, 64, 2, 2, 3, 0)), facts)
    with pytest.raises(ValueError, match="this variant has one of 2, 3, 4, 6, 8, 16 blocks here, got splits = 5"):
        planned(dataclasses.replace(s, override=(1, 4, 64, 2, 1, 5, 0)), facts)
    with pytest.raises(ValueError, match="blocks must be 0 for a cluster"):
        planned(dataclasses.replace(s, override=(1, 4, 64, 2, 1, 4, 80)), facts)
    scratch = dataclasses.replace(s, combine=Combine.SCRATCH, override=(1, 4, 64, 2, 1, 4, 80))
    assert planned(scratch, facts).blocks == 80
    with pytest.raises(ValueError, match="a multiple of splits = 4, got 82"):
        planned(dataclasses.replace(scratch, override=(1, 4, 64, 2, 1, 4, 82)), facts)


def test_a_long_selection_of_few_items_goes_past_a_cluster() -> None:
    facts = DeviceFacts.of_capability((9, 0))
    long = planned(shape(tokens=1, kv_heads=4, topk=4096), facts)
    assert (long.combine, long.splits) == (Combine.SCRATCH, 64)
    assert planned(shape(tokens=1, kv_heads=4, topk=16), facts).combine is Combine.CLUSTER


@pytest.mark.parametrize(
    "override, capability, message",
    [
        ((2, 4, 128, 2, 1, 1, 0), (9, 0), "0 < groups < stages"), ((0, 4, 128, 2, 1, 1, 0), (9, 0), "0 < groups"),
        ((1, 4, 128, 3, 0, 1, 0), (9, 0), "min_blocks > 0"), ((1, 4, 128, 3, 2, 0, 0), (9, 0), "splits > 0"),
        ((1, 4, 128, 3, 2, 1, -1), (9, 0), "blocks >= 0"), ((1, 3, 128, 3, 2, 1, 0), (9, 0), r"got \(3, 128\)"),
        ((1, 4, 7, 3, 2, 1, 0), (9, 0), r"got \(4, 7\)"), ((8, 8, 64, 9, 1, 1, 0), (9, 0), "2080 threads"),
        ((1, 4, 128, 3, 2, 3, 0), (9, 0), "2, 4, 8, 16 blocks here, got splits = 3"),
        ((3, 4, 64, 5, 1, 4, 0), (9, 0), "one or two groups of warps, got 3"),
        ((1, 4, 128, 3, 3, 2, 0), (9, 0), "more than 2 blocks a multiprocessor have no clusters, got 3"),
        ((1, 4, 64, 200, 1, 1, 0), (9, 0), "bytes of shared memory"), ((2, 4, 128, 5, 1, 1, 0), (12, 0), "bytes of shared"),
        ((1, 4, 64, 2, 1, 4, 0), (8, 0), r"a cluster needs compute capability 9\.0 or newer, this GPU has 8\.0"),
        ((1, 4, 64, 2, 1, 16, 0), (12, 0), "2, 3, 4, 6, 8 blocks here, got splits = 16"),
    ],
)  # fmt: skip
def test_a_forced_plan_that_cannot_run_is_refused(
    override: tuple[int, ...], capability: tuple[int, int], message: str
) -> None:
    with pytest.raises(ValueError, match=f"MSA_OPS_PLAN.*{message}"):
        planned(dataclasses.replace(shape(tokens=1), override=override), DeviceFacts.of_capability(capability))


@pytest.mark.parametrize(
    "splits, wanted",
    [
        (4, {"combine": Combine.NONE}), (1, {"combine": Combine.CLUSTER}), (1, {"combine": Combine.SCRATCH}),
        (4, {"force_fused": True}), (1, {"force_fused": False}),
    ],
)  # fmt: skip
def test_a_forced_plan_is_not_taken_against_what_else_is_forced(splits: int, wanted: dict[str, object]) -> None:
    forced = dataclasses.replace(shape(), override=(1, 4, 128, 3, 2, splits, 0), **wanted)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"splits = {splits} and .* exclude each other"):
        planned(forced, DeviceFacts.of_capability((9, 0)))


def test_a_forced_plan_of_more_than_a_launch_is_refused() -> None:
    many = dataclasses.replace(shape(tokens=2**29, kv_heads=1), override=(1, 4, 128, 3, 2, 4, 0))
    with pytest.raises(ValueError, match=r"2147483648 shares of items are more than one launch can serve"):
        planned(many, DeviceFacts.of_capability((9, 0)))


def test_what_the_sanitizer_selects_and_scores_is_right_on_the_cpu() -> None:
    """Arguments and checks of the calls that need a GPU to be of use."""
    assert sanitize.run_selection(torch.device("cpu"), torch.Generator().manual_seed(3)) == 0


def test_the_plans_that_the_sanitizer_runs_exist() -> None:
    """And take the routes between them."""
    facts = DeviceFacts.of_capability((9, 0))
    routes = set()
    for call in sanitize.attention_calls():
        s = Shape(
            KVFormat(call.kv.partition("-")[0]), call.batch * call.seqlen_q, call.kv_heads,
            call.query_heads // call.kv_heads, 16, combine=Combine[call.combine.upper()] if call.combine else None,
            override=tuple(map(int, call.plan.split(","))) if call.plan else None,
        )  # fmt: skip
        p = planned(s, facts)
        routes.add((s.kv_format, p.combine, p.variant.groups, p.splits))
    for kv_format in (KVFormat.FP8, KVFormat.BF16, KVFormat.NVFP4):
        wide = {(kv_format, Combine.CLUSTER, 2, size) for size in (2, 3)} | {(kv_format, Combine.NONE, 2, 1)}
        assert wide | {(kv_format, Combine.NONE, 1, 1)} <= routes
        assert {combine for kv, combine, *_ in routes if kv is kv_format} == set(Combine)


def test_forced_nvfp4_plans_have_the_kernels_shapes() -> None:
    wide = dataclasses.replace(shape(KVFormat.NVFP4), override=(1, 8, 128, 3, 1, 1, 0))
    with pytest.raises(ValueError, match=r"\(warps, tile\) must be one of \(\(4, 128\),\) here, got \(8, 128\)"):
        planned(wide, DeviceFacts.of_capability((9, 0)))


@pytest.mark.parametrize("combine, force_fused", [(None, False), (Combine.CLUSTER, None)])
def test_a_forced_cluster_is_no_larger_than_a_launch_can_be(combine: Combine | None, force_fused: bool | None) -> None:
    facts = DeviceFacts.of_capability((9, 0))
    for items, most in ((MAX_GRID // 16, 16), (MAX_GRID // 16 + 1, 8), (MAX_GRID // 2, 2), (MAX_GRID, 1)):
        p = planned(
            dataclasses.replace(shape(tokens=items, kv_heads=1), combine=combine, force_fused=force_fused), facts
        )
        assert (p.splits, p.blocks <= MAX_GRID) == (most, True)


H200_USUAL = ((2, 132), (4, 62), (8, 30), (16, 14))
H200_ONE_A_MULTIPROCESSOR = ((2, 66), (4, 30), (8, 15), (16, 7))


def h200_plan(s: Shape) -> LaunchPlan:
    """By the driver's answers there."""
    return plan.plan_for(
        s, DeviceFacts.of_capability((9, 0)), lambda v: H200_ONE_A_MULTIPROCESSOR if v.min_blocks == 1 else H200_USUAL
    )


@pytest.mark.parametrize(
    ("kv_format", "tokens", "name", "ranks"),
    [
        # (groups, warps, tile, stages, blocks a multiprocessor) and blocks of a cluster; four KV heads a token
        (KVFormat.FP8, 1, "g1w4t128s3b2", 16), (KVFormat.FP8, 2, "g2w4t128s5b1", 8), (KVFormat.FP8, 4, "g1w4t128s3b2", 8),
        (KVFormat.FP8, 5, "g2w4t128s5b1", 4),
        (KVFormat.FP8, 8, "g2w4t128s5b1", 2), (KVFormat.FP8, 16, "g2w4t128s5b1", 2),
        (KVFormat.BF16, 1, "g1w4t128s2b1", 16), (KVFormat.BF16, 2, "g1w8t64s5b1", 8), (KVFormat.BF16, 4, "g1w8t64s5b1", 4),
        (KVFormat.FP16, 7, "g1w8t64s5b1", 4), (KVFormat.BF16, 8, "g2w4t64s6b1", 2), (KVFormat.BF16, 9, "g2w4t64s5b1", 2),
        (KVFormat.BF16, 16, "g2w4t64s5b1", 2),
        (KVFormat.NVFP4, 1, "g1w4t128s3b2", 16), (KVFormat.NVFP4, 2, "g2w4t128s5b1", 8),
        (KVFormat.NVFP4, 4, "g1w4t128s3b2", 8), (KVFormat.NVFP4, 7, "g2w4t128s5b1", 4),
        (KVFormat.NVFP4, 8, "g1w4t128s3b2", 4), (KVFormat.NVFP4, 13, "g2w4t128s5b1", 2),
    ],
)  # fmt: skip
def test_clusters_of_an_h200(kv_format: KVFormat, tokens: int, name: str, ranks: int) -> None:
    """Where each kind of cluster was the fastest."""
    s = shape(kv_format, tokens)
    p = h200_plan(s)
    assert (p.variant.name, p.combine, p.splits) == (f"{kv_format.value}-{name}", Combine.CLUSTER, ranks)
    assert p.blocks == s.items * ranks <= 132


@pytest.mark.parametrize(
    "kv_format, early",
    [
        (KVFormat.FP8, {*range(1, 8), *range(50, 400)}), (KVFormat.BF16, set(range(1, 9))),
        (KVFormat.FP16, set(range(1, 9))), (KVFormat.NVFP4, set(range(133, 400))),
    ],
)  # fmt: skip
def test_where_blocks_read_early(kv_format: KVFormat, early: set[int]) -> None:
    """By items, on an H200; forced plans as well. Nowhere else: not below 9.0, and above it was not measured."""
    few = Shape(kv_format, 1, 1, 16, 16)
    for forced in (None, (1, 4, 128, 2, 2, 1, 0)):
        found = {n for n in range(1, 400) if h200_plan(dataclasses.replace(few, tokens=n, override=forced)).early}
        assert found == early, forced
    for capability in ((8, 0), (10, 0), (12, 0)):
        facts = DeviceFacts.of_capability(capability)
        plans = [plan.plan_for(shape(kv_format, n), facts, lambda v, f=facts: typical_room(f, v)) for n in (1, 64)]
        assert not any(p.early or "early" in p.why for p in plans)
    assert ("first tiles early" in h200_plan(shape(kv_format, 1)).why) == (1 in early and 4 in early)


@pytest.mark.parametrize(
    "kv_format, tokens, pages, most",
    [
        (KVFormat.FP8, 1, 1, 128), (KVFormat.FP8, 1, 128, 128), (KVFormat.FP8, 1, 129, 256), (KVFormat.FP8, 64, 256, 256),
        (KVFormat.FP8, 1, 257, None), (KVFormat.BF16, 4, 64, 128), (KVFormat.FP16, 16, 200, 256),
        (KVFormat.BF16, 8, 64, None), (KVFormat.FP16, 8, 200, None),  # clusters of two with a deeper ring
        (KVFormat.NVFP4, 4, 256, 256), (KVFormat.NVFP4, 8, 128, 128),
        (KVFormat.NVFP4, 64, 64, 128), (KVFormat.NVFP4, 6, 256, 256),
    ],
)  # fmt: skip
def test_where_the_attention_of_a_step_chooses(kv_format: KVFormat, tokens: int, pages: int, most: int | None) -> None:
    """By pages of the table, on an H200. Nowhere else: it was not measured."""
    s = shape(kv_format, tokens)
    facts, p = DeviceFacts.of_capability((9, 0)), h200_plan(s)
    chosen = plan.choosing_plan(p, s, facts, pages)
    assert (chosen and chosen.variant.selects) == most
    assert chosen is None or dataclasses.replace(chosen, variant=p.variant) == p, "the same work for the same blocks"
    assert plan.choosing_plan(p, dataclasses.replace(s, topk=32), facts, pages) == chosen
    assert plan.choosing_plan(p, dataclasses.replace(s, topk=33), facts, pages) is None
    for capability in ((8, 0), (10, 0), (12, 0)):
        other = DeviceFacts.of_capability(capability)
        taken = plan.plan_for(s, other, lambda v, f=other: typical_room(f, v))
        assert plan.choosing_plan(taken, s, other, pages) is None


@pytest.mark.parametrize("kv_format", [KVFormat.FP8, KVFormat.NVFP4])
def test_nvfp4_in_clusters_of_three_chooses_among_short_rows_alone(kv_format: KVFormat) -> None:
    facts, s = DeviceFacts.of_capability((9, 0)), shape(kv_format, 9)
    three = dataclasses.replace(h200_plan(s), splits=3, blocks=108)
    assert three.variant == plan.wide_variant(kv_format, facts)
    found = [plan.choosing_plan(three, s, facts, pages) for pages in (128, 129)]
    assert [p and p.variant.selects for p in found] == [128, 256 if kv_format is KVFormat.FP8 else None]


def test_candidates_are_for_free_calls_of_few_items() -> None:
    facts = DeviceFacts.of_capability((9, 0))
    assert plan.candidates(shape(KVFormat.FP8, 1), facts) == []
    for hint in (
        {"force_fused": False},
        {"force_fused": True},
        {"combine": Combine.CLUSTER},
        {"override": (1, 4, 128, 3, 2, 1, 0)},
    ):
        assert plan.candidates(dataclasses.replace(shape(tokens=8), **hint), facts) == []
    assert plan.candidates(shape(tokens=17), facts) == [], "more than half the multiprocessors"
    wide, special = plan.wide_variant(KVFormat.BF16, facts), plan.cluster_variants(KVFormat.BF16, facts)
    whole, tall, deep = special["whole"], special["tall"], special["deep"]
    for tokens, topk, wanted in (
        (1, 16, [whole]),
        (1, 20, []),
        (2, 16, [tall, wide]),
        (7, 16, [tall, wide]),
        (8, 16, [tall, deep, wide]),
        (9, 16, [wide]),
    ):
        assert plan.candidates(shape(KVFormat.BF16, tokens, topk=topk), facts) == wanted, (
            "nothing is loaded for nothing"
        )
    assert plan.candidates(shape(tokens=8), DeviceFacts.of_capability((10, 0))) == []


def test_a_whole_block_a_tile_is_for_thread_blocks_that_have_one_each() -> None:
    whole = plan.cluster_variants(KVFormat.BF16, DeviceFacts.of_capability((9, 0)))["whole"]
    assert h200_plan(shape(KVFormat.BF16, 1, topk=16)).variant == whole
    assert h200_plan(shape(KVFormat.BF16, 1, topk=8)).splits == 8
    assert h200_plan(shape(KVFormat.BF16, 1, topk=17)).variant != whole
    assert h200_plan(shape(KVFormat.BF16, 2, topk=16, kv_heads=4)).variant != whole


def test_eight_warps_share_a_tile_where_a_thread_block_has_few() -> None:
    tall = plan.cluster_variants(KVFormat.FP16, DeviceFacts.of_capability((9, 0)))["tall"]
    assert h200_plan(shape(KVFormat.FP16, 4, topk=16)).variant == tall  # eight tiles each
    assert h200_plan(shape(KVFormat.FP16, 4, topk=17)).variant == plan.wide_variant(
        KVFormat.FP16, DeviceFacts.of_capability((9, 0))
    )
    small = DeviceFacts.of_capability((9, 0), 31)  # a part of a GPU: no room for four blocks of each of eight items
    assert list(plan.cluster_variants(KVFormat.FP16, small)) == ["whole"]


def test_a_deeper_ring_where_clusters_of_two_leave_half_of_the_multiprocessors() -> None:
    deep = plan.cluster_variants(KVFormat.BF16, DeviceFacts.of_capability((9, 0)))["deep"]
    by_items = {n: h200_plan(dataclasses.replace(shape(KVFormat.BF16, n, topk=16), kv_heads=1)) for n in range(29, 36)}
    assert [n for n, p in by_items.items() if p.variant == deep] == [31, 32, 33]
    assert [by_items[n].splits for n in (29, 30, 31, 33, 34)] == [4, 4, 2, 2, 2]


def test_nvfp4_in_many_items_has_as_many_blocks_a_multiprocessor_as_they_fill() -> None:
    facts = DeviceFacts.of_capability((9, 0))
    three, four = plan.dense_variants(KVFormat.NVFP4, facts)
    assert [plan.blocks_per_multiprocessor(v, facts) for v in (three, four)] == [3, 4]
    for tokens, variant in ((99, three), (100, four), (128, four), (500, four)):  # 132 multiprocessors hold 396 and 528
        many = planned(shape(KVFormat.NVFP4, tokens), facts)
        assert (many.variant, many.combine, many.blocks) == (variant, Combine.NONE, 4 * tokens)
    fused = planned(dataclasses.replace(shape(KVFormat.NVFP4, 128), force_fused=True), facts)
    for p in (planned(shape(KVFormat.NVFP4, 66), facts), fused):
        assert p.variant == plan.choose_variant(KVFormat.NVFP4, facts)
    assert plan.dense_variants(KVFormat.FP8, facts) == []
