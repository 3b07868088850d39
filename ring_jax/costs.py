"""Closed forms of attention over N devices: work, bytes, memory and time, for each strategy.

Letters: B rows, T length of the whole sequence, c = T / N tokens a device, N_q and K query and key/value heads of one
device of the tensor axis, H and Hv head sizes, e and e_g bytes of an entry of K, V and of dK, dV on the road, F FLOP/s,
W bytes/s of a hop, m share of a c x c block that is computed.

    FLOPs of a step     forward 2 B N_q (H + Hv) c^2 m      backward 5/2 of it (scores once more, and four gradients)
    bytes of a hop      forward e B K (H + Hv) c            backward (e + e_g) B K (H + Hv) c
    hidden from c_min   forward (e / 2) (K / N_q) (F / W) / m     backward ((e + e_g) / 5) (K / N_q) (F / W) / m

What always holds: bytes are what `ring_jax.inspect` reads in the compiled program, entry for entry; times are models.

Reference:
  Ring Attention, arXiv:2310.01889 (its table 2 is c_min with K = N_q, e = 2, m = 1); Striped Attention,
  arXiv:2311.09431; Context Parallelism for Scalable Million-Token Inference, arXiv:2411.01783; DeepSpeed Ulysses,
  arXiv:2309.14509; BurstEngine, arXiv:2509.19836 (queries on the road); Zero Bubble, arXiv:2401.10241.
"""

from typing import Any, Literal, NamedTuple

from ring_jax import routes, ulysses
from ring_jax.links import Link
from ring_jax.masks import Rules
from ring_jax.options import Schedule
from ring_jax.routes import Grid, Reach

type PipelineSchedule = Literal["gpipe", "1f1b", "zb-h1", "zb-h2"]
STRATEGIES = ("ring", "all_gather", "ulysses", "usp")


class Call(NamedTuple):
    """One attention call: rows of one data shard, heads of one tensor shard, the whole sequence."""

    seq_len: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    batch: int = 1
    itemsize: int = 2
    gradient_itemsize: int = 4
    is_causal: bool = True
    window: int | None = None
    layout: str = "zigzag"

    @property
    def dims(self) -> int:
        """H + Hv."""
        return self.head_dim + self.value_dim

    def entry(self, num_devices: int) -> float:
        """Entries of K and V (or of Q and out) of one head on one device: B c (H + Hv)."""
        return self.batch * self.seq_len / num_devices * self.dims


class Passes(NamedTuple):
    """One figure for each pass."""

    forward: float
    backward: float

    def plus(self, other: "Passes") -> "Passes":
        """Sum, pass by pass."""
        return Passes(self.forward + other.forward, self.backward + other.backward)


def make_call(
    *, seq_len: int, num_heads: int, head_dim: int, num_kv_heads: int = 0, value_dim: int = 0, **other: Any
) -> Call:
    """A `Call`; 0 is as many key/value heads as heads, and values of the size of keys."""
    return Call(seq_len, num_heads, num_kv_heads or num_heads, head_dim, value_dim or head_dim, **other)


def grid_of(call: Call, strategy: str, num_devices: int) -> Grid | None:
    """How the axis is cut into places of the ring that exchange heads, or None where the heads do not divide."""
    size = {"ulysses": num_devices}.get(strategy, 1)
    if strategy == "usp":
        size = routes.ulysses_size(num_devices, Schedule(), call.num_heads, call.num_kv_heads)
    return None if call.num_heads % size else Grid("sequence", 1, num_devices // size, size)


def place_call(call: Call, grid: Grid) -> Call:
    """The call as a place of the ring sees it, after the exchange: its tokens, and some of the heads."""
    if grid.ulysses == 1:
        return call
    found = ulysses.route_heads(grid, call.num_heads, call.num_kv_heads)
    kept = (found.sent if found.used is None else found.used).shape[1]
    return call._replace(num_heads=call.num_heads // grid.ulysses, num_kv_heads=kept)


def exchanged_heads(call: Call, grid: Grid) -> int:
    """Key/value heads that a device sends in Ulysses, copies counted."""
    return ulysses.route_heads(grid, call.num_heads, call.num_kv_heads).sent.size


def num_hops(call: Call, grid: Grid) -> int:
    """Hops of K and V round the ring: to all other places, or with a window to those that the mask can reach."""
    if call.window is None:
        return grid.num_places - 1
    rules = Rules(call.is_causal, None if call.window is None else (call.window, 0 if call.is_causal else call.window))
    length = call.seq_len // grid.num_places
    plan = routes.reachable(grid, Reach(call.layout, rules, (length, length), True, True))
    return sum(1 for offset in plan[0] if offset)


def sent_bytes(call: Call, strategy: str, num_devices: int, *, rotate: str = "auto") -> Passes | None:
    """Bytes that one device sends, or None where the strategy cannot be used.

        ring, all-gather   e B K (H + Hv) c hops            backward e + e_g for e
        Ulysses            e B (N_q + K') (H + Hv) c (N - 1) / N, forward and backward; K': key/value heads with copies
        USP                Ulysses of u devices, and a ring of N / u places of u c tokens

    In a ring the backward pass sends Q, dO, two statistics and dQ in place of K, V, dK, dV where that is less.

    Args:
      call: sizes. strategy: one of `STRATEGIES`. num_devices: on the sequence axis. rotate: as in `Schedule`.
    """
    grid = grid_of(call, strategy, num_devices)
    if grid is None:
        return None
    if num_devices == 1:
        return Passes(0, 0)
    entry, e = call.entry(num_devices), call.itemsize
    if strategy == "all_gather":
        entries = entry * call.num_kv_heads * (num_devices - 1)
        return Passes(e * entries, (e + call.gradient_itemsize) * entries)
    exchanged = Passes(0, 0)
    if grid.ulysses > 1:
        sent = exchanged_heads(call, grid)
        # Gradients of copies come back in float32, to be summed where they came from.
        back = max(4, e) if sent != call.num_kv_heads else e
        part = entry * (grid.ulysses - 1) / grid.ulysses
        exchanged = Passes(part * e * (call.num_heads + sent), part * (e * call.num_heads + back * sent))
    if grid.num_places == 1:
        return exchanged
    inner, hops = place_call(call, grid), num_hops(call, grid)
    forward, back = hop_bytes(inner, grid.num_places).forward, sum(backward_hop(inner, grid.num_places, rotate))
    return exchanged.plus(Passes(hops * forward, hops * back))


def backward_hop(call: Call, num_places: int, rotate: str = "auto") -> tuple[float, float]:
    """Bytes of a hop of the backward pass: (what is only read, the gradient that rides with it).

    With keys on the road K, V and dK, dV; with queries Q, dO, lse, delta and dQ; "auto" takes the smaller.
    """
    tokens = call.batch * call.seq_len / num_places
    keys = tokens * call.num_kv_heads * call.dims
    queries = tokens * call.num_heads
    by_keys = call.itemsize * keys, call.gradient_itemsize * keys
    by_queries = (
        queries * (call.itemsize * call.dims + 2 * max(4, call.itemsize)),
        queries * call.gradient_itemsize * call.head_dim,
    )
    if rotate != "auto":
        return by_queries if rotate == "queries" else by_keys
    return min(by_keys, by_queries, key=sum)


def step_shares(call: Call, num_devices: int, tile: int | None = None) -> list[float]:
    """Share of a c x c block that the busiest device computes, step by step.

        not causal             1 everywhere
        causal, contiguous     1/2, then 1: the last device sees every key, so N - 1/2 in all
        causal, striped        (n + 1) / (2 n), n = c / tile: whole tiles on the diagonal
        causal, zigzag         1/2 everywhere: N / 2 in all

    With a window: what it leaves of the sum, spread over the steps that are taken.
    """
    local, count = call.seq_len / num_devices, num_devices
    if call.window is not None:
        hops = num_hops(call, Grid("sequence", 1, num_devices, 1))
        width = call.window + 1 if call.is_causal else 2 * call.window + 1
        seen = min(local * width, local * call.seq_len / (2 if call.is_causal else 1)) / local**2
        return [seen / (hops + 1)] * (hops + 1)
    if not call.is_causal:
        return [1.0] * count
    if call.layout == "striped":
        n = local / (tile or 1)
        return [(n + 1) / (2 * n)] * count
    if call.layout == "zigzag":
        return [0.5] * count
    return [0.5] + [1.0] * (count - 1)


def balance(call: Call, num_devices: int, tile: int | None = None) -> float:
    """Ideal work over the busiest device's: 1 for zigzag, N / (2 N - 1) for contiguous causal, n / (n + 1) striped.

    Example:
      >>> call = make_call(seq_len=65536, num_heads=32, head_dim=128, layout="contiguous")
      >>> round(balance(call, 8), 3)
      0.533
    """
    if call.window is not None:
        return 1.0
    ideal = num_devices * (0.5 if call.is_causal else 1.0)
    return ideal / sum(step_shares(call, num_devices, tile))


def step_flops(call: Call, num_devices: int, share: float = 1.0) -> tuple[float, float]:
    """(forward, backward) FLOPs of a step in which ``share`` of the c x c block is computed."""
    local = call.seq_len / num_devices
    forward = 2 * call.batch * call.num_heads * call.dims * local**2 * share
    return forward, 2.5 * forward


def hop_bytes(call: Call, num_devices: int) -> Passes:
    """Bytes of a hop, forward (K, V) and backward (K, V and their gradients)."""
    block = call.entry(num_devices) * call.num_kv_heads
    return Passes(call.itemsize * block, (call.itemsize + call.gradient_itemsize) * block)


def hidden_length(
    *, kv_share: float, itemsize: int, gradient_itemsize: int, flops: float, rate: float, share: float = 1.0
) -> tuple[float, float]:
    """(forward, backward) c_min: tokens a device from which a hop is hidden behind a step.

    Args:
      kv_share: key/value heads over query heads. flops: FLOP/s that the kernel reaches (the peak: the worst case).
      rate: bytes/s of a hop. share: of a block that a step computes, 1/2 for balanced causal masks.

    Example:
      >>> [round(x) for x in hidden_length(kv_share=1, itemsize=2, gradient_itemsize=4, flops=312e12, rate=300e9)]
      [1040, 1248]
    """
    ratio = kv_share * flops / rate / share
    return itemsize / 2 * ratio, (itemsize + gradient_itemsize) / 5 * ratio


def merge_share(*, flops: float, hbm_bandwidth: float, local_length: int, share: float, efficiency: float) -> float:
    """Time of an unfused float32 merge of partial results over that of a step: 10 eta F / (4 c m BW).

    It reads 4 + 2 bytes an entry of the output and writes 4. This library's kernels carry (o, m, l) instead.

    Example:
      >>> round(merge_share(flops=9.9e14, hbm_bandwidth=3.4e12, local_length=8192, share=0.5, efficiency=0.6), 3)
      0.107
    """
    return 10 * efficiency * flops / (4 * local_length * share * hbm_bandwidth)


def keys_should_travel(
    *, new_tokens: int, cached_tokens: int, num_devices: int, kv_share: float, itemsize: int, flops: float, rate: float
) -> bool:
    """Whether a ring that moves keys serves T new tokens over P cached ones, or queries should move (algorithm 1).

        T >= N (F / W) e K / (2 N_q)   or   T / (T + P) >= 2 K / N_q

    Example:
      >>> test = dict(num_devices=4, kv_share=8 / 128, itemsize=2, flops=8e14, rate=25e9)
      >>> keys_should_travel(new_tokens=1280, cached_tokens=8720, **test)
      True
      >>> keys_should_travel(new_tokens=1240, cached_tokens=8760, **test)
      False

    Reference:
      arXiv:2411.01783, section 3.4.
    """
    enough = num_devices * flops * kv_share * itemsize / (2 * rate)
    return new_tokens >= enough or new_tokens / (new_tokens + cached_tokens) >= 2 * kv_share


def ulysses_sends_less_from(num_heads: int, num_kv_heads: int) -> float:
    """Devices above which Ulysses sends less than a ring: 1 + N_q / K."""
    return 1 + num_heads / num_kv_heads


def attention_memory(call: Call, strategy: str, num_devices: int) -> Passes | None:
    """Bytes on a device while attention runs, forward and backward; None where the strategy cannot be used.

    Ring, tokens c: Q e + O e + float32 sum 4, and lse 4 for each query; K, V that are here and that arrive. Backward
    adds dO e and dQ 4, and two float32 blocks of dK, dV. All-gather: K, V (backward also float32 dK, dV) of the whole
    sequence. Ulysses: Q, O, dO and K, V before and after the exchange.
    """
    grid = grid_of(call, strategy, num_devices)
    if grid is None:
        return None
    inner, e, rows = place_call(call, grid), call.itemsize, call.batch * call.seq_len / grid.num_places
    queries = rows * inner.num_heads * (e * call.dims + 4 * call.value_dim + 4)
    backward = rows * inner.num_heads * (e * call.value_dim + 4 * call.head_dim)
    block = rows * inner.num_kv_heads * call.dims
    if strategy == "all_gather":
        whole = block * num_devices
        return Passes(queries + e * (block + whole), queries + backward + e * (block + whole) + 4 * whole)
    blocks = 2 if grid.num_places > 1 else 1
    before = e * call.entry(num_devices) * (call.num_heads + call.num_kv_heads) if grid.ulysses > 1 else 0
    forward = queries + blocks * e * block + before
    return Passes(forward, forward + backward + blocks * 4 * block)


def pipeline_bubble(
    num_stages: int,
    num_microbatches: int,
    repeats: int = 1,
    *,
    schedule: PipelineSchedule = "gpipe",
    times: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> float:
    """Share of a step in which a stage waits, with p stages, m microbatches, v passes of each over the devices.

        gpipe, 1f1b, circular   (p - 1) / (v m + p - 1)
        zb-h1                   x / (m (F + B + W) + x),  x = (p - 1) (F + B - W)
        zb-h2                   the same with             x = (p - 1) (F + B - 2 W)

    ``times`` are F, B, W: forward, gradient of the input, gradient of the weights, of one microbatch on one stage.

    Example:
      >>> round(pipeline_bubble(8, 32), 4), round(pipeline_bubble(8, 32, repeats=4), 4)
      (0.1795, 0.0519)
      >>> round(pipeline_bubble(8, 32, schedule="zb-h1"), 3)
      0.068
    """
    if schedule in ("gpipe", "1f1b"):
        return (num_stages - 1) / (repeats * num_microbatches + num_stages - 1)
    forward, inputs, weights = times
    waits = (num_stages - 1) * (forward + inputs - (1 if schedule == "zb-h1" else 2) * weights)
    return waits / (num_microbatches * sum(times) + waits)


def in_flight(num_stages: int, num_microbatches: int, schedule: PipelineSchedule = "gpipe") -> int:
    """Microbatches whose activations a stage holds at most."""
    held = {"gpipe": num_microbatches, "zb-h2": 2 * num_stages - 1}.get(schedule, num_stages)
    return min(num_microbatches, held)


class Timing(NamedTuple):
    """Seconds of one call: what is computed, and what of the transfers nothing hides."""

    compute: Passes
    exposed: Passes

    @property
    def total(self) -> float:
        """Forward and backward."""
        return sum(self.compute) + sum(self.exposed)


def attention_time(
    call: Call, strategy: str, link: Link, rates: tuple[float, float], *, two_directions: bool = False
) -> Timing | None:
    """Predicted seconds of one call; None where the strategy cannot be used.

    Ring: a step takes as long as the longer of its work and the hop that it hides; forward N - 1 hops of N steps,
    backward the gradient's last hop home is hidden by nothing. All-gather and Ulysses: nothing hides a transfer.

    Args:
      call: sizes. link: of the sequence axis. rates: FLOP/s that the kernel reaches, forward and backward.
      two_directions: half of the keys go each way.
    """
    grid = grid_of(call, strategy, link.size)
    if grid is None:
        return None
    inner, places = place_call(call, grid), grid.num_places
    shares = step_shares(inner, places)
    flops = step_flops(inner, places)
    work = Passes(*(sum(shares) * flops[i] / rates[i] for i in range(2)))
    if link.size == 1:
        return Timing(work, Passes(0.0, 0.0))
    if strategy == "all_gather":
        whole = call.entry(1) * call.num_kv_heads
        gathered, scattered = link.gather(call.itemsize * whole), link.gather(call.gradient_itemsize * whole)
        return Timing(work, Passes(gathered, gathered + scattered))
    exposed = Passes(0.0, 0.0)
    if grid.ulysses > 1:
        held = call.itemsize * call.entry(link.size) * (call.num_heads + exchanged_heads(call, grid))
        exchanged = link.part(grid.ulysses).exchange(held) + 2 * link.latency  # three messages
        exposed = Passes(exchanged, exchanged)
    hops = num_hops(call, grid)
    if hops:
        around = link.every(grid.ulysses)
        steps = [Passes(*(share * flops[i] / rates[i] for i in range(2))) for share in shares]
        exposed = exposed.plus(_ring_waits(inner, around, steps, hops, two_directions))
    return Timing(work, exposed)


def _ring_waits(call: Call, link: Link, steps: list[Passes], hops: int, two_directions: bool) -> Passes:
    """What the steps of a ring do not hide; a step can hide the hop that starts with it."""
    read, gradient = backward_hop(call, link.size, "keys" if two_directions else "auto")
    keys = link.hop(hop_bytes(call, link.size).forward, two_directions)
    first, both, home = (link.hop(sent, two_directions) for sent in (read, read + gradient, gradient))
    forward = sum(max(0.0, keys - step.forward) for step in steps[:hops])
    backward = max(0.0, first - steps[0].backward) + sum(max(0.0, both - step.backward) for step in steps[1:hops])
    return Passes(forward, backward + home)
