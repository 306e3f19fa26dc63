"""Which variant of the kernel serves a call, and how its work is split: pure functions of shapes and device facts.

Nothing here touches a GPU, so every rule is tested without one. A plan never depends on device values (lengths, ids), so a
captured launch stays right when they change.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ...contract import BLOCK_SIZE, HEAD_DIM, SCALES_PER_ROW, KVFormat

SOURCES = (
    "common.cuh", "cluster.cuh", "base.cuh", "widen.cuh", "params.cuh", "partial.cuh", "copy.cuh", "narrow.cuh", "select.cuh",
    "query.cuh", "product.cuh", "softmax.cuh", "meeting.cuh", "decode.cu", "merge.cu",
)  # fmt: skip
"""Files of the decode kernel and its merge kernel, in order."""
ROW_TILE = 16
"""Query heads that one block serves: the rows of the matrix instruction."""
MAX_GRID = 2**31 - 1
SYSTEM_SHARED = 1024
"""Shared memory that the system takes of every resident block."""
CLUSTER_SIZES: tuple[int, ...] = (2, 4, 8, 16)
SIZES_BETWEEN = (3, 6)
"""Further sizes, for variants of one block a multiprocessor. Only the first 2 or 4 blocks of such a cluster own rows."""

# Shared memory that one block may have, in bytes, by compute capability (CUDA programming guide, "technical specifications
# per compute capability"). On a device the driver's own figure is used.
SHARED_PER_BLOCK = {
    (8, 0): 166912, (8, 6): 101376, (8, 7): 166912, (8, 9): 101376, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448,
    (10, 7): 232448, (11, 0): 232448, (12, 0): 101376, (12, 1): 101376,
}  # fmt: skip


class Combine(enum.IntEnum):
    """How the results of an item's blocks meet. The values are the kernel's."""

    NONE = 0
    CLUSTER = 1
    SCRATCH = 2


@dataclass(frozen=True)
class Variant:
    """One compilation of the kernel source."""

    kv_format: KVFormat
    groups: int
    warps: int
    tile: int
    stages: int
    min_blocks: int
    selects: int = 0
    """Pages of a table up to which it chooses blocks by their scores itself; 0: it reads ids."""

    @property
    def name(self) -> str:
        choice = f"c{self.selects}" if self.selects else ""
        return f"{self.kv_format.value}-g{self.groups}w{self.warps}t{self.tile}s{self.stages}b{self.min_blocks}{choice}"

    @property
    def sources(self) -> tuple[str, ...]:
        return SOURCES

    @property
    def defines(self) -> tuple[str, ...]:
        return (
            f"-DKV_FORMAT=KV_{self.kv_format.name}",
            f"-DGROUPS={self.groups}",
            f"-DWARPS={self.warps}",
            f"-DTILE={self.tile}",
            f"-DSTAGES={self.stages}",
            f"-DMIN_BLOCKS={self.min_blocks}",
            *((f"-DSELECTS={self.selects}",) if self.selects else ()),
        )

    @property
    def threads(self) -> int:
        return (self.groups * self.warps + 1) * 32  # one warp copies

    @property
    def static_shared_bytes(self) -> int:
        """Upper bound of the kernel's static shared memory, in the kilobytes that the ring's alignment makes of it."""
        # meeting.cuh: Ring with the barriers of a cluster, GroupShared, and each group's part of what PEER_ROWS counts.
        ring, group = 48 * self.stages + 32, 128 * self.warps + 144
        peers = 192 if self.cluster_sizes == CLUSTER_SIZES else 288
        return -(-(ring + self.groups * (group + peers)) // 1024) * 1024

    @property
    def cluster_sizes(self) -> tuple[int, ...]:
        """Blocks of the clusters that it can be launched in, ascending; `_sizes_that_pay` are those that plans choose."""
        return tuple(sorted(CLUSTER_SIZES + SIZES_BETWEEN)) if self.min_blocks == 1 else CLUSTER_SIZES

    def dynamic_bytes(self, combine: Combine, splits: int = 1) -> int:
        """Dynamic shared memory: the copy ring, each group's two buffers of weights, the query (NVFP4, four blocks),
        NVFP4's scales of V where they are put in order, and where partial results meet. `splits`: blocks of a cluster."""
        scaled = self.kv_format is KVFormat.NVFP4
        stage = self.tile * (ROW_BYTES[self.kv_format] + scaled * SCALES_PER_ROW) * 2
        value_scales = scaled * self.tile * SCALES_PER_ROW
        query = ROW_TILE * HEAD_DIM * 2 if scaled and self.min_blocks >= 4 else 0  # product.cuh, QUERY_STAYS
        meeting = ROW_TILE * HEAD_DIM * 4 if combine is Combine.CLUSTER or self.groups > 1 else 0
        if combine is Combine.CLUSTER and splits in SIZES_BETWEEN:
            meeting += meeting // 2  # meeting.cuh, PEER_ROWS
        return self.stages * stage + self.groups * (2 * ROW_TILE * self.tile * 2 + query + value_scales + meeting)

    @property
    def shared_bytes(self) -> int:
        """The most dynamic shared memory that a route of this variant needs."""
        return max(self.dynamic_bytes(Combine.CLUSTER, size) for size in self.cluster_sizes)

    @property
    def resident_bytes(self) -> int:
        """Dynamic shared memory of the blocks that are to share a multiprocessor. Dense ones serve whole items alone."""
        return self.dynamic_bytes(Combine.NONE) if self.min_blocks > 2 else self.shared_bytes


ROW_BYTES = {KVFormat.BF16: 256, KVFormat.FP16: 256, KVFormat.FP8: 128, KVFormat.NVFP4: 64}


@dataclass(frozen=True)
class DeviceFacts:
    """What a plan needs to know of a GPU."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_per_block: int
    shared_per_multiprocessor: int

    @property
    def has_clusters(self) -> bool:
        """Thread-block clusters, distributed shared memory, tensor copies and dependent launch."""
        return self.capability >= (9, 0)

    @property
    def max_cluster(self) -> int:
        """Blocks of the largest cluster worth asking for: 16 is opt-in and exists on 9.0 and 10.x, 8 is portable."""
        if not self.has_clusters:
            return 1
        return 16 if self.capability[0] in (9, 10) else 8

    @staticmethod
    def of_capability(capability: tuple[int, int], multiprocessors: int = 132) -> DeviceFacts:
        """Facts of a typical device of that capability, for planning without one."""
        shared = SHARED_PER_BLOCK[capability]
        return DeviceFacts(capability, multiprocessors, shared, shared + SYSTEM_SHARED)


ClusterRoom = tuple[tuple[int, int], ...]
"""Pairs (cluster size, clusters of that size that run at the same time), as the driver answers for a kernel."""
_TYPICAL_SHARE = {2: 1.0, 3: 0.89, 4: 0.91, 6: 0.78, 8: 0.91, 16: 0.85}
"""Of all blocks at once, those in clusters, by their size. Clusters lie inside a GPC, whose multiprocessors rarely divide
evenly: with a block on each of its 132 an H200 holds 66 clusters of 2, 39 of 3, 30 of 4, 17 of 6, 15 of 8 and 7 of 16."""


def typical_room(facts: DeviceFacts, variant: Variant) -> ClusterRoom:
    """An estimate of the driver's answer, for planning without a device: an H200's, by the number of multiprocessors."""
    blocks = facts.multiprocessors * blocks_per_multiprocessor(variant, facts)
    sizes = [size for size in variant.cluster_sizes if size <= facts.max_cluster]
    return tuple((size, int(blocks * _TYPICAL_SHARE[size]) // size) for size in sizes)


@dataclass(frozen=True)
class Shape:
    """The part of a problem that decides its plan."""

    kv_format: KVFormat
    tokens: int
    kv_heads: int
    group: int
    topk: int
    force_fused: bool | None = None
    combine: Combine | None = None
    """Forced by MSA_OPS_COMBINE; None: chosen."""
    override: tuple[int, ...] | None = None
    """Forced by MSA_OPS_PLAN, for measurements: groups, warps, tile, stages, min_blocks, splits, blocks (0: all)."""

    @property
    def row_tiles(self) -> int:
        return -(-self.group // ROW_TILE)

    @property
    def items(self) -> int:
        """Pieces of work that share nothing: token, KV head, and 16 of its query heads."""
        return self.tokens * self.kv_heads * self.row_tiles


@dataclass(frozen=True)
class LaunchPlan:
    """One launch of `blocks` blocks over `items * splits` shares, and a merge kernel behind it for `Combine.SCRATCH`."""

    variant: Variant
    combine: Combine
    splits: int
    blocks: int
    why: str
    early: bool = False
    """Blocks ask L2 for their first tile while the kernel before still runs, by ids, lengths and pages as they are then."""


def scratch_elements(shape: Shape, splits: int) -> tuple[int, int]:
    """Partial output values and fp32 state values (maximum, sum) that the scratch route stores."""
    rows = shape.items * splits * ROW_TILE
    return rows * HEAD_DIM, rows * 2


# Kernel-notes has the measurements behind these. (groups, warps, stages, min_blocks) in order of preference.
_TILE = {KVFormat.BF16: 64, KVFormat.FP16: 64, KVFormat.FP8: 128, KVFormat.NVFP4: 128}
_CONFIGS = ((1, 4, 3, 2), (1, 4, 2, 2), (1, 4, 2, 1))
_NVFP4_CONFIGS = ((1, 4, 3, 2), (1, 4, 4, 1), (1, 4, 2, 1))
_WIDE_CONFIG = (2, 4, 5, 1)
"""One block a multiprocessor, where two groups of warps share the ring."""
_DENSE_CONFIGS = ((1, 4, 3, 3), (1, 4, 2, 4))
"""NVFP4 in many items: widening keeps the warps busy, and more blocks hide more of it. The fewest blocks a multiprocessor that
hold all items at once, or the most: the hardware would pile more on some multiprocessors than on others. They serve whole
items alone."""
_CLUSTER_CONFIGS = {"whole": (1, 4, BLOCK_SIZE, 2, 1), "tall": (1, 8, 64, 5, 1), "deep": (2, 4, 64, 6, 1)}
"""16-bit KV in clusters (groups, warps, tile, stages, min_blocks): a tile that is a whole selected block, for thread blocks
that have one each; eight warps on a tile, which have half as much to do each while nothing else hides it; and wide blocks with
a deeper ring, for as many clusters of two as leave half of the multiprocessors, and of the copies under way, to nobody."""
CLUSTER_KINDS = tuple(_CLUSTER_CONFIGS)
_WIDE_ITEMS = 8
"""Items from which on clusters of one block a multiprocessor are the faster ones."""
_TALL_RANKS, _TALL_TILES = 4, 8
"""Blocks of a cluster from which on, and tiles of a block up to which, eight warps on a tile are faster than two groups."""
_TALL_SIZES, _WIDE_SIZES = (6,), (3,)
"""Sizes between the powers of two that pay for tall and for wide variants: a block's tiles then fit its ring."""
_DEEP_RANKS, _DEEP_FROM = 2, 0.85
"""Blocks of a cluster for which a deeper ring is faster if four for each item would not be more than there are multiprocessors,
and the share of these from which on clusters of four may not fit."""
_ROOMY = {KVFormat.NVFP4: 4, KVFormat.FP8: 8}
"""Blocks from which on twice as large clusters of usual blocks are faster than wide ones."""
_ROOMY_SHARE, _ROOMY_RANKS = 0.8, 4
"""Share of the clusters that fit, and the largest clusters of wide blocks, up to which that holds."""
_EARLY = {
    KVFormat.FP8: (7, 0.375),
    KVFormat.BF16: (8, math.inf),
    KVFormat.FP16: (8, math.inf),
    KVFormat.NVFP4: (0, 1.0),
}
"""Items up to which reading early pays, and items a multiprocessor beyond which it pays again."""


CHOICES = (128, 256)
"""Pages of a table up to which the attention of a step chooses its blocks itself: one kernel less, but what a warp does for it
is on the way to the first copy. Beyond 256 that takes as long as the kernel. A program for each: what only longer rows need
would cost shorter ones as much as they gain."""
_MOST_CHOSEN = 32
"""Ids of a token and KV head up to which it may: one a lane."""


def choose_variant(kv_format: KVFormat, facts: DeviceFacts) -> Variant:
    """The variant for most calls: the deepest ring with which a multiprocessor still holds as many blocks as wanted."""
    configs = _NVFP4_CONFIGS if kv_format is KVFormat.NVFP4 else _CONFIGS
    for groups, warps, stages, blocks in configs:
        variant = Variant(kv_format, groups, warps, _TILE[kv_format], stages, blocks)
        if _fits(variant, facts) and blocks_per_multiprocessor(variant, facts) >= blocks:
            return variant
    raise AssertionError(f"no variant of {kv_format} fits {facts.shared_per_block} bytes of shared memory")


def wide_variant(kv_format: KVFormat, facts: DeviceFacts) -> Variant | None:
    """The variant of one block a multiprocessor, or None where it was not measured.

    On 10.x and 11.0 bf16 spills in the 168 registers a thread that its nine warps leave.
    """
    groups, warps, stages, blocks = _WIDE_CONFIG
    variant = Variant(kv_format, groups, warps, _TILE[kv_format], stages, blocks)
    return variant if facts.capability == (9, 0) and _fits(variant, facts) else None


def cluster_variants(kv_format: KVFormat, facts: DeviceFacts) -> dict[str, Variant]:
    """The variants made for clusters alone, by `CLUSTER_KINDS`, as far as a device has room for what they are for; none where
    the usual ones are as good or nothing was measured."""
    if kv_format not in (KVFormat.BF16, KVFormat.FP16) or facts.capability != (9, 0):
        return {}
    found = {kind: Variant(kv_format, *config) for kind, config in _CLUSTER_CONFIGS.items()}
    if facts.multiprocessors < _WIDE_ITEMS * _TALL_RANKS:
        del found["tall"], found["deep"]
    return found


def dense_variants(kv_format: KVFormat, facts: DeviceFacts) -> list[Variant]:
    """The variants for more items than two blocks a multiprocessor, ascending; none where the usual one is as good or
    nothing was measured."""
    if kv_format is not KVFormat.NVFP4 or facts.capability != (9, 0):
        return []
    return [
        Variant(kv_format, groups, warps, _TILE[kv_format], stages, blocks)
        for groups, warps, stages, blocks in _DENSE_CONFIGS
    ]


def _dense_variant(shape: Shape, facts: DeviceFacts) -> Variant | None:
    """The one of them for a call that has so many items."""
    found = dense_variants(shape.kv_format, facts)
    roomy = [v for v in found if shape.items <= facts.multiprocessors * blocks_per_multiprocessor(v, facts)]
    return next(iter(roomy), found[-1] if found else None)


def may_choose(facts: DeviceFacts, topk: int, pages: int) -> bool:
    """Whether some call with so many ids and pages has an attention that chooses its blocks itself."""
    return facts.capability == (9, 0) and topk <= _MOST_CHOSEN and pages <= CHOICES[-1]


def choosing_variant(variant: Variant, facts: DeviceFacts, pages: int) -> Variant | None:
    """This variant as one that chooses blocks among `pages` itself, or None where a selection before it is as fast or nothing
    was measured."""
    if not may_choose(facts, 1, pages) or variant == cluster_variants(variant.kv_format, facts).get("deep"):
        return None
    return replace(variant, selects=next(most for most in CHOICES if pages <= most))


def choosing_plan(plan: LaunchPlan, shape: Shape, facts: DeviceFacts, pages: int) -> LaunchPlan | None:
    """The plan of a step's attention that chooses its blocks itself, given the one of an attention that does not; None where
    the selection is a kernel of its own."""
    variant = choosing_variant(plan.variant, facts, pages)
    if variant is None or not may_choose(facts, shape.topk, pages):
        return None
    # NVFP4 in clusters of three: 2 to 4% slower with rows of 256.
    three = plan.combine is Combine.CLUSTER and plan.splits in _WIDE_SIZES
    if three and shape.kv_format is KVFormat.NVFP4 and variant.selects == CHOICES[1]:
        return None
    return replace(plan, variant=variant)


def _fits(variant: Variant, facts: DeviceFacts) -> bool:
    return variant.shared_bytes + variant.static_shared_bytes <= facts.shared_per_block


def blocks_per_multiprocessor(variant: Variant, facts: DeviceFacts) -> int:
    """Blocks of this variant that one multiprocessor holds at once."""
    per_block = variant.resident_bytes + variant.static_shared_bytes + SYSTEM_SHARED
    return max(1, min(variant.min_blocks, facts.shared_per_multiprocessor // per_block))


def candidates(shape: Shape, facts: DeviceFacts) -> list[Variant]:
    """The variants whose clusters come before the usual one's for this call, in order of preference: `make_plan` wants the
    room of each."""
    free = shape.force_fused is None and shape.combine is None and shape.override is None
    if not free or shape.items > facts.multiprocessors // 2:
        return []
    special = cluster_variants(shape.kv_format, facts)
    if shape.items < _WIDE_ITEMS:
        wanted = [special.get("whole") if shape.topk in CLUSTER_SIZES else None]
    else:
        share = shape.items * _TALL_RANKS / facts.multiprocessors
        tall = special.get("tall") if share <= 1 else None
        deep = special.get("deep") if _DEEP_FROM <= share <= 1 else None
        wanted = [tall, deep, wide_variant(shape.kv_format, facts)]
    return [variant for variant in wanted if variant is not None]


def plan_for(shape: Shape, facts: DeviceFacts, room_of: Callable[[Variant], ClusterRoom]) -> LaunchPlan:
    """The plan of a call. `room_of` is asked for the variants whose clusters come into question."""
    if not facts.has_clusters:
        return make_plan(shape, facts, ())
    room = room_of(choose_variant(shape.kv_format, facts))
    return make_plan(shape, facts, room, tuple(room_of(variant) for variant in candidates(shape, facts)))


@lru_cache(maxsize=4096)
def make_plan(
    shape: Shape, facts: DeviceFacts, room: ClusterRoom, candidate_rooms: tuple[ClusterRoom, ...] = ()
) -> LaunchPlan:
    """The plan of a call. `room` is the driver's answer for `choose_variant`'s kernel (or `typical_room`), `candidate_rooms`
    are those for `candidates`'s."""
    plan = _choose_plan(shape, facts, room, candidate_rooms) if shape.override is None else _overridden(shape, facts)
    return replace(plan, early=True, why=f"{plan.why}; first tiles early") if _reads_early(shape, facts) else plan


def _reads_early(shape: Shape, facts: DeviceFacts) -> bool:
    if facts.capability != (9, 0):  # needs dependent launch, and was measured there alone
        return False
    few, many = _EARLY[shape.kv_format]
    return shape.items <= few or shape.items > many * facts.multiprocessors


def _choose_plan(
    shape: Shape, facts: DeviceFacts, room: ClusterRoom, candidate_rooms: tuple[ClusterRoom, ...]
) -> LaunchPlan:
    variant = choose_variant(shape.kv_format, facts)
    slots = facts.multiprocessors * blocks_per_multiprocessor(variant, facts)
    combine, splits, why = _split(shape, variant, facts, room, slots)
    if combine is not Combine.SCRATCH:
        for other, its_room in zip(candidates(shape, facts), candidate_rooms, strict=False):
            ranks = _largest_cluster(shape, other, facts, its_room)
            if _pays(shape, other, facts, ranks, splits, dict(room).get(splits, 0)):
                why = f"{why}; clusters of {other.warps * other.groups} warps a block, tiles of {other.tile} keys"
                return LaunchPlan(other, Combine.CLUSTER, ranks, shape.items * ranks, why)
    if combine is not Combine.NONE:
        return LaunchPlan(variant, combine, splits, shape.items * splits, why)
    half = facts.multiprocessors // 2
    wide = wide_variant(shape.kv_format, facts)
    if wide is not None and half < shape.items <= facts.multiprocessors and shape.force_fused is None:
        return LaunchPlan(wide, combine, 1, shape.items, f"{why}; one item a multiprocessor, two groups")
    dense = _dense_variant(shape, facts)
    if dense is not None and shape.items > slots and shape.force_fused is None:
        return LaunchPlan(dense, combine, 1, shape.items, f"{why}; {dense.min_blocks} blocks a multiprocessor")
    return LaunchPlan(variant, combine, 1, min(shape.items, slots), why)


def _pays(shape: Shape, variant: Variant, facts: DeviceFacts, ranks: int, usual_ranks: int, usual_room: int) -> bool:
    """Whether clusters of `ranks` blocks of this candidate are faster than the usual variant's, of `usual_ranks` blocks, of
    which `usual_room` fit."""
    if ranks == 1:
        return False
    tiles = shape.topk * (BLOCK_SIZE // variant.tile)
    special = cluster_variants(shape.kv_format, facts)
    if variant == special.get("whole"):
        return tiles <= ranks
    if variant == special.get("tall"):
        return ranks >= _TALL_RANKS and tiles <= _TALL_TILES * ranks
    if variant == special.get("deep"):
        return ranks == _DEEP_RANKS
    least = max(2 * ranks, _ROOMY.get(shape.kv_format, MAX_GRID))
    return not (ranks <= _ROOMY_RANKS and usual_ranks >= least and shape.items <= _ROOMY_SHARE * usual_room)


def _largest_cluster(shape: Shape, variant: Variant, facts: DeviceFacts, room: ClusterRoom) -> int:
    """Blocks of the largest cluster an item that all run at once, of the sizes that pay; 1 where none does."""
    tiles, sizes = shape.topk * (BLOCK_SIZE // variant.tile), _sizes_that_pay(shape, variant, facts)
    fit = {n for n, many in room if n <= tiles and shape.items <= many and shape.items * n <= facts.multiprocessors}
    if shape.kv_format is KVFormat.FP8 and shape.items == dict(room).get(_WIDE_SIZES[0]):
        fit.discard(_WIDE_SIZES[0])  # as many as there is room for: slower than clusters of two
    return max(fit.intersection(sizes), default=1)


def _sizes_that_pay(shape: Shape, variant: Variant, facts: DeviceFacts) -> tuple[int, ...]:
    if variant == cluster_variants(shape.kv_format, facts).get("tall"):
        return CLUSTER_SIZES + _TALL_SIZES
    # Clusters of two that leave half of the multiprocessors to the next call are as fast with fp8.
    halves = shape.kv_format is KVFormat.FP8 and 4 * shape.items <= facts.multiprocessors
    if variant == wide_variant(shape.kv_format, facts) and not halves:
        return CLUSTER_SIZES + _WIDE_SIZES
    return CLUSTER_SIZES


def _overridden(shape: Shape, facts: DeviceFacts) -> LaunchPlan:
    """The plan of MSA_OPS_PLAN. Raises `ValueError` for one that no kernel is made for, that does not fit the device, or that
    contradicts what else is asked for."""
    assert shape.override is not None
    groups, warps, tile, stages, min_blocks, splits, blocks = shape.override
    variant = Variant(shape.kv_format, groups, warps, tile, stages, min_blocks)
    combine = shape.combine
    if combine is None:
        combine = Combine.NONE if splits == 1 else Combine.CLUSTER
    if not (0 < groups < stages and min_blocks > 0 and splits > 0 and blocks >= 0):
        raise ValueError(
            f"MSA_OPS_PLAN needs 0 < groups < stages, min_blocks > 0, splits > 0 and blocks >= 0, got {shape.override}"
        )
    shapes = ((4, 128),) if shape.kv_format is KVFormat.NVFP4 else ((4, 64), (4, 128), (8, 64), (8, 128))
    if (warps, tile) not in shapes:
        raise ValueError(f"MSA_OPS_PLAN: (warps, tile) must be one of {shapes} here, got {(warps, tile)}")
    if variant.threads > _MOST_THREADS:
        raise ValueError(f"MSA_OPS_PLAN: {variant.threads} threads are more than a block can have ({_MOST_THREADS})")
    if (combine is Combine.NONE) != (splits == 1):
        raise ValueError(
            f"MSA_OPS_PLAN: splits = {splits} and MSA_OPS_COMBINE={combine.name.lower()} exclude each other"
        )
    if shape.force_fused is not None and shape.force_fused != (splits == 1):
        raise ValueError(f"MSA_OPS_PLAN: splits = {splits} and force_fused={shape.force_fused} exclude each other")
    if combine is Combine.CLUSTER:
        _check_forced_cluster(variant, splits, facts)
    shared = variant.dynamic_bytes(combine, splits) + variant.static_shared_bytes
    if shared > facts.shared_per_block:
        raise ValueError(
            f"MSA_OPS_PLAN: a block needs {shared} bytes of shared memory, more than it can have ({facts.shared_per_block})"
        )
    if shape.items * splits > MAX_GRID:
        raise ValueError(
            f"MSA_OPS_PLAN: {shape.items * splits} shares of items are more than one launch can serve ({MAX_GRID})"
        )
    # A cluster serves one item, and every block of a smaller grid must keep its place among an item's blocks.
    if splits > 1 and blocks and (combine is Combine.CLUSTER or blocks % splits):
        raise ValueError(
            f"MSA_OPS_PLAN: blocks must be 0 for a cluster and a multiple of splits = {splits}, got {blocks}"
        )
    return LaunchPlan(variant, combine, splits, min(shape.items * splits, blocks or MAX_GRID), "MSA_OPS_PLAN")


_MOST_THREADS = 1024


def _check_forced_cluster(variant: Variant, splits: int, facts: DeviceFacts) -> None:
    if not facts.has_clusters:
        raise ValueError(f"MSA_OPS_PLAN: a cluster {_needs_clusters(facts)}")
    if variant.groups > 2:
        raise ValueError(f"MSA_OPS_PLAN: blocks of a cluster have one or two groups of warps, got {variant.groups}")
    if variant.min_blocks > 2:
        raise ValueError(
            f"MSA_OPS_PLAN: variants of more than 2 blocks a multiprocessor have no clusters, got {variant.min_blocks}"
        )
    sizes = [size for size in variant.cluster_sizes if size <= facts.max_cluster]
    if splits not in sizes:
        raise ValueError(
            f"MSA_OPS_PLAN: a cluster of this variant has one of {', '.join(map(str, sizes))} blocks here, "
            f"got splits = {splits}"
        )


def _needs_clusters(facts: DeviceFacts) -> str:
    return f"needs compute capability 9.0 or newer, this GPU has {facts.capability[0]}.{facts.capability[1]}"


def _split(
    shape: Shape, variant: Variant, facts: DeviceFacts, room: ClusterRoom, slots: int
) -> tuple[Combine, int, str]:
    """How many blocks share an item, and how they meet."""
    if shape.force_fused is True and shape.combine in (None, Combine.NONE):
        return Combine.NONE, 1, "force_fused: one block per (token, KV head)"
    if shape.combine is Combine.NONE:
        return Combine.NONE, 1, "MSA_OPS_COMBINE=none"
    tiles = shape.topk * (BLOCK_SIZE // variant.tile)
    if shape.combine is Combine.CLUSTER and not facts.has_clusters:
        raise ValueError(f"MSA_OPS_COMBINE=cluster {_needs_clusters(facts)}")
    if facts.has_clusters and shape.combine is not Combine.SCRATCH:
        if shape.force_fused is False or shape.combine is Combine.CLUSTER:
            most = tiles if shape.combine is Combine.CLUSTER else shape.topk
            # Powers of two alone, of which all blocks own rows, and no more blocks than one launch can have.
            most = min(most, MAX_GRID // max(1, shape.items))
            splits = max((size for size, many in room if size in CLUSTER_SIZES and size <= most and many), default=1)
            if splits == 1:
                return Combine.NONE, 1, "asked to split: one block, or no cluster that this device can hold"
            return Combine.CLUSTER, splits, f"asked to split: the largest cluster, {splits} blocks an item"
        splits = _largest_cluster(shape, variant, facts, room)
        # A long selection of few items is worth more blocks than a cluster has.
        if tiles < _LONG_SHARE * splits or 2 * shape.items * splits > facts.multiprocessors:
            combine = Combine.CLUSTER if splits > 1 else Combine.NONE
            return combine, splits, f"{shape.items} items on {facts.multiprocessors} multiprocessors"
    wanted = shape.topk if shape.force_fused is False else slots // max(1, shape.items)
    if shape.combine is Combine.SCRATCH:
        wanted = max(2, wanted)
    splits = max(1, min(wanted, tiles, _MOST_SPLITS, MAX_GRID // max(1, shape.items)))
    if splits == 1:
        return Combine.NONE, 1, f"{shape.items} items fill {slots} block slots"
    return Combine.SCRATCH, splits, f"{shape.items} items on {slots} block slots, partial results in memory"


_LONG_SHARE = 32
"""Tiles of one block from which on partial results in memory and a second kernel (about 3 us) cost less than few blocks."""
_MOST_SPLITS = 64
"""Beyond this many partial results of an item, merging them costs more than more blocks gain."""


def variants(capability: tuple[int, int]) -> list[Variant]:
    """Every variant that a call on such a device can ask for. Raises `ValueError` for a capability that is not supported."""
    if capability not in SHARED_PER_BLOCK:
        known = ", ".join(f"{major}.{minor}" for major, minor in SHARED_PER_BLOCK)
        raise ValueError(f"compute capability must be one of {known}, got {capability[0]}.{capability[1]}")
    return variants_for(DeviceFacts.of_capability(capability), tuple(KVFormat))


def variants_for(facts: DeviceFacts, formats: Sequence[KVFormat]) -> list[Variant]:
    """Every variant that a call with one of these KV formats can ask for on a device."""
    found: list[Variant] = []
    for kv_format in formats:
        found.append(choose_variant(kv_format, facts))
        wide = wide_variant(kv_format, facts)
        found += [] if wide is None else [wide]
        found += [*cluster_variants(kv_format, facts).values(), *dense_variants(kv_format, facts)]
    choosing = [choosing_variant(variant, facts, pages) for variant in found for pages in CHOICES]
    return found + [variant for variant in choosing if variant is not None]
