"""Attention of the newest tokens over a static key/value cache, in one Pallas call.

Axis letters::

    B  sequences                     D  head dimension of queries and keys
    H  kv heads                      E  head dimension of values
    G  query heads of a kv head      S  keys that the cache has room for
    L  new tokens of a sequence      P  query rows of one score tile

A decode step is a stream of the cache's valid part: whatever is computed must fit into its shadow. The call walks a
list of *works*, each the heads of one item of one sequence, and divides each into *items* of a block of keys::

    bounds [B, 2 + 2L], in SMEM: keys that a sequence needs at all; first and end for each of its new tokens
    ring of groups of items in VMEM, filled across works, so that the channel to HBM never runs dry
    for each group:
        wait for its items
        stage by stage, for all its items:   q · K, mask, maximum, exponential, sum, p · V
        fold the partial softmaxes into the running one, in order; rewrite their works' rows of the result
        start the copies of the group that takes its place

The core issues in order, and only independent work hides the latency of its units: hence the stages. Copies bring the
valid keys only, to a whole tile. What else stands in a slot is masked in the scores and zeroed in V: 0 times NaN is
NaN.

The G x L query rows of a kv head are the rows of one product. Fewer than 8 would waste a register: then several heads
share one tile, each row of it selected from the product with its own head's keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from . import decode_append
from .decode_append import Append
from .shapes import BASE, COPIED, END, FIELDS, FIRST, FRESH, LANES, SUBLANES, WORK, Config, Shape, at_keys

F32 = jnp.float32
LOG2_E = math.log2(math.e)
# The score of a masked key, and a maximum over none: the former vanishes beside the latter.
MASKED, NO_MAXIMUM = -2e38, -1e30


def scratch_of(shape: Shape, config: Config, *, whole: bool = False) -> dict[str, Any]:
    """The kernel's scratch shapes by name. `whole`: whole blocks are copied."""
    slots, rows = config.ring * config.unroll, config.tile_rows(shape)

    def ring(dim: int, transposed: bool) -> Any:
        tile = (dim, config.block) if transposed else (config.block, dim)
        return pltpu.VMEM((slots, config.heads, *tile), shape.dtype)

    scratch = {
        "query": pltpu.VMEM((config.works(shape), rows, shape.head_dim), shape.dtype),
        **{name: ring(*cache) for name, cache in shape.caches.items()},
        "maximum": pltpu.VMEM((rows, LANES), F32),
        "total": pltpu.VMEM((rows, LANES), F32),
        "sums": pltpu.VMEM((rows, shape.value_dim), F32),
        "items": pltpu.SMEM((slots, FIELDS), jnp.int32),
        "arrived": pltpu.SemaphoreType.DMA((config.ring,)),
        "new_arrived": pltpu.SemaphoreType.DMA((1,)),
    }
    return scratch | decode_append.scratch_of(shape, config, whole=whole) if shape.appends else scratch


def _iota(shape: tuple[int, int], axis: int) -> jax.Array:
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _lanes(x: jax.Array, length: int) -> jax.Array:
    """[P, 128] with equal lanes as [P, length]: without the shuffles of a broadcast."""
    whole, rest = divmod(length, LANES)
    return jnp.concatenate([x] * whole + ([x[:, :rest]] if rest else []), axis=1)


class _Copies:
    """The items' way into the ring."""

    def __init__(self, ref: Any, shape: Shape, config: Config, *, whole: bool) -> None:
        self._ref, self._shape, self._config, self._whole = ref, shape, config, whole
        self._works = config.works(shape)
        self._groups = shape.kv_heads // config.heads
        self._chunk = pl.program_id(0) * self._works
        self._append = Append(ref, shape, config, self._appended, whole=whole) if shape.appends else None

    def sequence(self, work: Any) -> Any:
        """The sequence of a work."""
        return jax.lax.div(self._chunk + work, self._groups)

    def bounds(self, work: Any, field: int) -> Any:
        """The field of a work's sequence: 0 and 1 for all its keys, from 2 on for each new token."""
        return self._ref.bounds[self.sequence(work) * self._shape.bounds + field]

    def _appended(self, work: Any) -> list[Any]:
        return [self.bounds(work, 2 + 2 * self._shape.new + each) for each in range(3)]

    def _copies(self, group: Any, slot: Any) -> list[Any]:
        ref, shape, item = self._ref, self._shape, self._ref.items

        def copy(name: str, transposed: bool) -> Any:
            granule = shape.granule_of(transposed)
            copied = self._config.block
            if not self._whole:
                copied = pl.multiple_of((item[slot, COPIED] + granule - 1) & -granule, granule)
            there = pl.ds(pl.multiple_of(item[slot, BASE], shape.granule), copied)
            work = self._chunk + item[slot, WORK]
            return pltpu.make_async_copy(
                getattr(ref, f"{name}_hbm").at[at_keys(transposed, work, slice(None), there)],
                getattr(ref, name).at[at_keys(transposed, slot, slice(None), pl.ds(0, copied))],
                ref.arrived.at[group],
            )

        return [copy(name, transposed) for name, (_, transposed) in shape.caches.items()]

    def start(self, group: Any, place: tuple[Any, Any]) -> tuple[Any, Any]:
        """Starts the copies of a group from `place`, a work and a block in it; returns the next group's place."""
        shape, config, item = self._shape, self._config, self._ref.items
        work, block = place
        for each in range(config.unroll):
            slot = group * config.unroll + each
            live, mine = work < self._works, jnp.minimum(work, self._works - 1)
            first, end = self.bounds(mine, 0), self.bounds(mine, 1)
            begin = (first & -shape.granule) + block * config.block
            left = jnp.where(live, end - begin, 0)
            valid = jnp.clip(left, 0, config.block)
            base = jnp.minimum(begin, shape.keys - config.block) if self._whole else begin
            item[slot, WORK] = mine
            item[slot, BASE] = base
            item[slot, FIRST] = jnp.where(valid > 0, jnp.maximum(first, begin) - base, 0)
            item[slot, END] = jnp.where(valid > 0, begin - base + valid, 0)
            item[slot, FRESH] = (live & (block == 0)).astype(jnp.int32)
            item[slot, COPIED] = valid

            @pl.when(item[slot, COPIED] < config.block)
            def _(slot: Any = slot) -> None:
                self._ref.value[slot] = jnp.zeros_like(self._ref.value[slot])

            @pl.when(valid > 0)
            def _(slot: Any = slot) -> None:
                for copy in self._copies(group, slot):
                    copy.start()

            more = left > config.block
            work, block = jnp.where(more, work, work + 1), jnp.where(more, block + 1, 0)
        return work, block

    def wait(self, group: Any) -> None:
        """Waits for a group's copies, and zeroes values that came along in the tiles at both ends."""
        shape, config, item = self._shape, self._config, self._ref.items
        slots = [group * config.unroll + each for each in range(config.unroll)]
        for slot in slots:

            @pl.when(item[slot, END] > 0)
            def _(slot: Any = slot) -> None:
                for copy in self._copies(group, slot):
                    copy.wait()

        # Only now is any of them there for sure: they share a semaphore.
        if self._append is not None:
            self._append.put(group)
        tile = max(shape.granule, 32 // shape.itemsize)
        for slot in slots:

            @pl.when((item[slot, FIRST] > 0) | (item[slot, END] & (shape.granule - 1) > 0) | self._whole)
            def _(slot: Any = slot) -> None:
                if self._whole:
                    self._zero_others(slot, 0, config.block)
                    return
                last = (item[slot, END] - 1) & -tile
                for begin in (0, pl.multiple_of(last, tile)):
                    self._zero_others(slot, begin, tile)

    def _zero_others(self, slot: Any, begin: Any, count: int) -> None:
        """Zeroes, among `count` values, those that are not the item's own."""
        transposed, item = self._shape.value_transposed, self._ref.items
        for head in range(self._config.heads):
            there = at_keys(transposed, slot, head, pl.ds(begin, count))
            value = self._ref.value[there]
            key = begin + _iota(value.shape, 1 if transposed else 0)
            own = (key >= item[slot, FIRST]) & (key < item[slot, END])
            self._ref.value[there] = jnp.where(own, value, jnp.zeros_like(value))

    def fill(self) -> Any:
        """Starts the copies of as many groups as there is room for; the state that `each` goes on from."""
        zero = jnp.int32(0)
        return jax.lax.fori_loop(0, self._config.ring, self._refill, (zero, zero, zero))

    def each(self, state: Any, visit: Callable[[Any], None]) -> None:
        """``visit(group)`` for each group once it is there; then refills it."""

        def step(state: Any) -> Any:
            done, group, *rest = state
            self.wait(group)
            visit(group)
            rest = self._refill(group, rest)
            return done + 1, jnp.where(group == self._config.ring - 1, 0, group + 1), *rest

        zero = jnp.int32(0)
        jax.lax.while_loop(lambda state: state[0] < state[2], step, (zero, zero, *state))
        if self._append is not None:
            self._append.finish()

    def _refill(self, group: Any, state: Any) -> Any:
        started, work, block = state
        more = work < self._works
        work, block = jax.lax.cond(more, lambda: self.start(group, (work, block)), lambda: (work, block))
        return started + more.astype(jnp.int32), work, block


def _kernel(
    *refs: Any,
    names: Sequence[str],
    shape: Shape,
    config: Config,
    scale: float,
    softcap: float | None,
    whole: bool,
    exact: bool,
) -> None:
    ref = SimpleNamespace(**dict(zip(names, refs, strict=True)))
    works, rows, block = config.works(shape), config.tile_rows(shape), config.block
    chunk = pl.program_id(0) * works
    if shape.shared:
        ref.value = ref.key
    # What comes at once: the new tokens' queries, and the keys and values to be written.
    at_once = ["query", *(f"new_{name}" for name in shape.caches if shape.appends)]
    arrivals = [
        pltpu.make_async_copy(
            getattr(ref, f"{name}_hbm").at[pl.ds(chunk, works)], getattr(ref, name), ref.new_arrived.at[0]
        )
        for name in at_once
    ]
    for arrival in arrivals:
        arrival.start()
    for name in ("maximum", "total", "sums"):
        state = getattr(ref, name)
        state[...] = jnp.zeros_like(state)
    copies = _Copies(ref, shape, config, whole=whole)
    tile_rows = max(SUBLANES, shape.head_rows)
    tile_heads = tile_rows // shape.head_rows
    column = _iota((tile_rows, block), 1)
    # With several heads in a tile, or rows in a head, which one a row is of.
    row = _iota((tile_rows, 1), 0)
    head_of_row = jax.lax.div(row, shape.head_rows)
    token_of_row = jax.lax.rem(jax.lax.rem(_iota((tile_rows, LANES), 0), shape.head_rows), shape.new)

    def dot(a: jax.Array, b: jax.Array, contract: int) -> jax.Array:
        if exact:
            a, b = a.astype(F32), b.astype(F32)
        precision = jax.lax.Precision.HIGHEST if a.dtype == F32 else jax.lax.Precision.DEFAULT
        dimensions = (((1,), (contract,)), ((), ()))
        return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=F32)

    def by_head(tile: int, product: Callable[[int], jax.Array]) -> jax.Array:
        """A tile's rows, each from the product with its own head."""
        first = tile * tile_heads
        value = product(first)
        for place in range(1, min(tile_heads, config.heads - first)):
            value = jnp.where(head_of_row == place, product(first + place), value)
        return value

    def by_token(slot: Any, field: int) -> Any:
        """A bound of each row's token, relative to the item: a number if all rows are of one, else [P, block]."""
        values = [
            copies.bounds(ref.items[slot, WORK], field + token) - ref.items[slot, BASE]
            for token in range(shape.new)
        ]
        if shape.new == 1:
            return values[0]
        bound = jnp.broadcast_to(values[0], (tile_rows, LANES))
        for token, value in enumerate(values[1:], 1):
            bound = jnp.where(token_of_row == token, value, bound)
        return _lanes(bound, block)

    def compute(group: Any) -> None:
        slots = [group * config.unroll + each for each in range(config.unroll)]
        tiles = [(each, tile) for each in range(config.unroll) for tile in range(rows // tile_rows)]
        valid = []
        for slot in slots:
            first = jnp.maximum(by_token(slot, 2), ref.items[slot, FIRST])
            end = jnp.minimum(by_token(slot, 2 + shape.new), ref.items[slot, END])
            valid.append((column >= first) & (column < end))

        def scores(each: int, tile: int) -> jax.Array:
            slot = slots[each]
            query = ref.query[ref.items[slot, WORK], pl.ds(tile * tile_rows, tile_rows)]
            contract = 0 if shape.key_transposed else 1
            x = by_head(tile, lambda head: dot(query, ref.key[slot, head], contract))
            if softcap is None:
                return x * (scale * LOG2_E)
            return jnp.tanh(x * (scale / softcap)) * (softcap * LOG2_E)

        def products(weights: jax.Array, each: int, tile: int) -> jax.Array:
            contract = 1 if shape.value_transposed else 0
            return by_head(tile, lambda head: dot(weights, ref.value[slots[each], head], contract))

        def in_lanes(x: jax.Array) -> jax.Array:
            return jnp.broadcast_to(x, (tile_rows, LANES))

        x = [scores(*place) for place in tiles]
        x = [jnp.where(valid[each], s, MASKED) for s, (each, _) in zip(x, tiles, strict=True)]
        maxima = [in_lanes(jnp.maximum(jnp.max(s, axis=1, keepdims=True), NO_MAXIMUM)) for s in x]
        x = [jnp.exp2(s - _lanes(m, block)) for s, m in zip(x, maxima, strict=True)]
        totals = [in_lanes(jnp.sum(w, axis=1, keepdims=True)) for w in x]
        sums = [products(w.astype(shape.dtype), *place) for w, place in zip(x, tiles, strict=True)]
        for (each, tile), *partial in zip(tiles, maxima, totals, sums, strict=True):
            fold(slots[each], pl.ds(tile * tile_rows, tile_rows), *partial)

    def fold(slot: Any, there: Any, maximum: jax.Array, total: jax.Array, sums: jax.Array) -> None:
        fresh = ref.items[slot, FRESH] == 1
        work = ref.items[slot, WORK]
        nothing = NO_MAXIMUM, 0.0
        if shape.sinks:
            group = jax.lax.rem(chunk + work, shape.kv_heads // config.heads)
            nothing = ref.sinks[group, there] * LOG2_E, 1.0
        before = jnp.where(fresh, nothing[0], ref.maximum[there])
        both = jnp.maximum(before, maximum)
        old, new = jnp.exp2(before - both), jnp.exp2(maximum - both)
        total = old * jnp.where(fresh, nothing[1], ref.total[there]) + new * total
        old, new = (_lanes(each, shape.value_dim) for each in (old, new))
        sums = old * jnp.where(fresh, 0.0, ref.sums[there]) + new * sums
        ref.maximum[there], ref.total[there], ref.sums[there] = both, total, sums
        # A row that sees no key has a total of 0 and sums of 0.
        inverse = _lanes(pl.reciprocal(jnp.maximum(total, 1e-30)), shape.value_dim)
        ref.out[work, there] = (sums * inverse).astype(ref.out.dtype)

    state = copies.fill()
    for arrival in arrivals:
        arrival.wait()
    copies.each(state, compute)


def call(
    bounds: jax.Array,
    query: jax.Array,
    caches: dict[str, jax.Array],
    new: dict[str, jax.Array],
    sinks: jax.Array | None,
    *,
    shape: Shape,
    config: Config,
    scale: float,
    softcap: float | None,
    interpret: Any,
) -> list[jax.Array]:
    """One `pallas_call`: [W, M, E] from operands that stay in HBM, W works of M rows (`Config.tile_rows`).

    Args:
      bounds: [B * (2 + 2L)] int32: for each sequence the keys it needs, first and end; then first key of each
        new token, then the end of each. An empty range is 0, 0. If keys are appended [B * (5 + 2L)]: then the place
        of the first new key, and the first and the end of the keys that are written.
      query: [W, M, D].
      caches: "key" [W, heads, S, D], or [W, heads, D, S], and unless shared "value", with E in place of D.
      new: by the same names [W, heads x L padded, D]; empty unless keys are appended.
      sinks: [H / heads, M, 128] f32, equal in all lanes.

    Returns: the result, and the caches if keys are appended: in the memory of the given ones where XLA may.
    """
    # XLA's interpreter copies no dynamic number of keys.
    whole = interpret is True
    scratch = scratch_of(shape, config, whole=whole)
    operands = {
        "bounds": bounds,
        "query": query,
        **caches,
        **{f"new_{name}": each for name, each in new.items()},
    }
    operands = {name if name == "bounds" else f"{name}_hbm": each for name, each in operands.items()}
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    specs = [hbm] * (len(operands) - 1)
    if sinks is not None:
        operands["sinks"] = sinks
        specs.append(pl.BlockSpec(memory_space=pltpu.VMEM))
    works, rows = config.works(shape), config.tile_rows(shape)
    pairs = shape.sequences * shape.kv_heads * shape.keys
    written = [f"{name}_out" for name in new]
    return pl.pallas_call(  # type: ignore[no-any-return]
        functools.partial(
            _kernel,
            names=(*operands, "out", *written, *scratch),
            shape=shape,
            config=config,
            scale=scale,
            softcap=softcap,
            whole=whole,
            exact=interpret is not False,
        ),
        name="decode_attention",
        out_shape=[
            jax.ShapeDtypeStruct((query.shape[0], rows, shape.value_dim), shape.dtype),
            *(jax.ShapeDtypeStruct(caches[name].shape, shape.dtype) for name in new),
        ],
        input_output_aliases={
            list(operands).index(f"{name}_hbm"): place for place, name in enumerate(new, start=1)
        },
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(config.chunks,),
            in_specs=specs,
            out_specs=[
                pl.BlockSpec((works, rows, shape.value_dim), lambda chunk, _: (chunk, 0, 0)),
                *[hbm] * len(new),
            ],
            scratch_shapes=list(scratch.values()),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=config.vmem_bytes,
            # The last tile of an axis that is no whole number of tiles is padding, which XLA provides.
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * shape.rows * (shape.head_dim + shape.value_dim),
            bytes_accessed=pairs * sum(dim for dim, _ in shape.caches.values()) * shape.itemsize,
            transcendentals=pairs * shape.rows,
        ),
        interpret=interpret,
    )(*operands.values())
