"""What each strategy would cost for one call, which is best, and the words for it: what `ring_jax.plan` returns.

What always holds: the strategy that is named fits the memory of a device, unless none does, and then a note says so.
"""

import dataclasses
from typing import Any, NamedTuple

from ring_jax import costs
from ring_jax.costs import Call
from ring_jax.hardware import Hardware
from ring_jax.links import Link


class Setting(NamedTuple):
    """Where a call runs."""

    hardware: Hardware
    link: Link
    efficiency: tuple[float, float]
    """Share of the peak that the kernel reaches, forward and backward."""
    two_directions: bool = False

    @property
    def rates(self) -> tuple[float, float]:
        """FLOP/s of the kernel, forward and backward."""
        forward, backward = self.efficiency
        return self.hardware.flops * forward, self.hardware.flops * backward

    def hidden_length(self, call: Call) -> tuple[float, float]:
        """(forward, backward) tokens a device from which a hop is hidden behind a step of these kernels."""
        share, rate = costs.step_shares(call, self.link.size)[-1], self.link.hop_rate(self.two_directions)
        forward, backward = (
            costs.hidden_length(
                kv_share=call.num_kv_heads / call.num_heads,
                itemsize=call.itemsize,
                gradient_itemsize=call.gradient_itemsize,
                flops=flops,
                rate=rate,
                share=share,
            )
            for flops in self.rates
        )
        return forward[0], backward[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One strategy for a call: seconds, bytes that one device sends, and bytes on it, forward and backward."""

    strategy: str
    forward_s: float
    backward_s: float
    exposed_s: float
    """Of both passes: transfers that nothing hides."""
    sent_forward: float
    sent_backward: float
    memory: float
    """While the backward pass runs (forward, where there is none)."""
    fits: bool
    """That memory is within the device's."""

    @property
    def total_s(self) -> float:
        """Both passes."""
        return self.forward_s + self.backward_s


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What `plan` found; ``print(plan)`` shows it, `to_dict` is plain data.

    Attributes:
      strategy: the one to use. reason: why, in words.
      ring_pays: the ring is the fastest, or within 2 % of it.
      options: every strategy that the sizes allow, fastest first.
      local_length: tokens a device. hidden_length: (forward, backward) tokens from which a ring's hops are hidden.
      hardware, link: what was assumed. notes: what else should be known, each a sentence.
    """

    strategy: str
    reason: str
    ring_pays: bool
    options: tuple[Option, ...]
    local_length: int
    hidden_length: tuple[float, float]
    hardware: str
    link: str
    num_devices: int
    notes: tuple[str, ...]

    def option(self, strategy: str) -> Option:
        """The row of one strategy."""
        for option in self.options:
            if option.strategy == strategy:
                return option
        known = ", ".join(option.strategy for option in self.options)
        raise ValueError(f"{strategy=} is not among the options of this plan: {known}")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as JSON has it."""
        return dataclasses.asdict(self) | {
            "options": [dataclasses.asdict(option) | {"total_s": option.total_s} for option in self.options],
            "hidden_length": list(self.hidden_length),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("strategy", "forward ms", "backward ms", "exposed ms", "sent MB", "memory GB", "")
        ]
        for x in self.options:
            sent = (x.sent_forward + x.sent_backward) / 1e6
            times = (f"{seconds * 1e3:,.3f}" for seconds in (x.forward_s, x.backward_s, x.exposed_s))
            fits = "" if x.fits else "does not fit"
            rows.append((x.strategy, *times, f"{sent:,.1f}", f"{x.memory / 1e9:.2f}", fits))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        forward, backward = self.hidden_length
        return "\n".join(
            [
                f"{self.num_devices} x {self.hardware}, {self.link}, {self.local_length:,} tokens a device; "
                f"hops are hidden from {forward:,.0f} forward, {backward:,.0f} backward",
                *lines,
                f"use {self.strategy}: {self.reason}",
                *self.notes,
            ]
        )


def predict(call: Call, setting: Setting) -> list[Option]:
    """Every strategy that the sizes allow, fastest first."""
    found, link, rates = [], setting.link, setting.rates
    for strategy in costs.STRATEGIES:
        grid = costs.grid_of(call, strategy, link.size)
        if grid is None or (strategy == "usp" and (grid.ulysses == 1 or grid.num_places == 1)):
            continue  # heads do not divide, or it is one of the others
        timing = costs.attention_time(call, strategy, link, rates, two_directions=setting.two_directions)
        sent, memory = (f(call, strategy, link.size) for f in (costs.sent_bytes, costs.attention_memory))
        assert timing is not None and sent is not None and memory is not None
        found.append(
            Option(
                strategy=strategy,
                forward_s=timing.compute.forward + timing.exposed.forward,
                backward_s=timing.compute.backward + timing.exposed.backward,
                exposed_s=sum(timing.exposed),
                sent_forward=sent.forward,
                sent_backward=sent.backward,
                memory=memory.backward,
                fits=memory.backward <= setting.hardware.hbm_bytes,
            )
        )
    return sorted(found, key=lambda option: option.total_s)


def decide(call: Call, setting: Setting, options: list[Option]) -> Plan:
    """The fastest that fits; the ring, which holds least, where it is as fast within 2 %."""
    link = setting.link
    local, ring = call.seq_len // link.size, next(x for x in options if x.strategy == "ring")
    fitting = [x for x in options if x.fits] or [ring]
    best = fitting[0]
    pays = ring in fitting and ring.total_s <= 1.02 * best.total_s and link.size > 1
    best = ring if pays or link.size == 1 else best
    hidden = setting.hidden_length(call)
    return Plan(
        strategy=best.strategy,
        reason=_reason(best, ring, options, hidden, local, link),
        ring_pays=pays,
        options=tuple(options),
        local_length=local,
        hidden_length=hidden,
        hardware=setting.hardware.name,
        link=link.words,
        num_devices=link.size,
        notes=tuple(_notes(call, setting, options, ring)),
    )


def _reason(best: Option, ring: Option, options: list[Option], hidden, local: int, link: Link) -> str:
    if link.size == 1:
        return "one device on the sequence axis: nothing is sent"
    if best is ring:
        others = [x for x in options if x is not ring]
        gain = f"; {others[0].strategy} would take {others[0].total_s / ring.total_s:.2f} of its time" if others else ""
        if local >= hidden[1]:
            return f"{local:,} tokens a device hide every hop but the gradient's last, and it holds least{gain}"
        return f"not every hop is hidden, but nothing that fits is faster by more than 2 %{gain}"
    why = f"it sends {_all(best) / _all(ring):.2f} of a ring's bytes"
    if best.strategy == "all_gather":
        why = f"one transfer each way costs less than {link.size - 1} hops that are not hidden"
    short = "" if local >= hidden[1] else f"; {local:,} tokens a device are too few to hide a hop"
    return f"{why}: {best.total_s / ring.total_s:.2f} of a ring's time{short}"


def _all(option: Option) -> float:
    return option.sent_forward + option.sent_backward


def _notes(call: Call, setting: Setting, options: list[Option], ring: Option) -> list[str]:
    """What the table does not say."""
    notes, link, device = [], setting.link, setting.hardware
    step = costs.step_flops(call, link.size, costs.step_shares(call, link.size)[-1])[0] / setting.rates[0]
    if link.size > 1 and step < 4 * link.latency:
        notes.append(
            f"A step works for {step * 1e6:,.0f} us, and a hop waits {link.latency * 1e6:,.0f} us for its first byte."
        )
    if link.is_slow:
        notes.append(
            f"The ring runs at {link.hop_rate() / 1e9:.1f} GB/s a hop ({link.words}), not at the "
            f"{device.link_bytes * device.achieved / 1e9:.0f} of the fast link: all wait for the slowest hop."
        )
    if link.size > 1 and call.batch >= link.size:
        notes.append(
            f"There are {call.batch} rows for {link.size} devices: data parallelism needs no transfer in attention."
        )
    if link.size > 1 and call.seq_len <= 16384:
        notes.append(
            "Context parallelism was measured to gain nothing up to 16K tokens on H100 (NeMo's long-sequence results)."
        )
    if link.size > 1 and call.seq_len // link.size <= 2048:
        notes.append(
            "Below 2K tokens a block kernels reach 30 to 50 % of their long-block rate: times here are too low."
        )
    efficiency = costs.balance(call, link.size)
    if efficiency < 0.95:
        notes.append(f"The layout {call.layout} keeps devices busy for {efficiency:.1%} of the time; use zigzag.")
    if not any(option.fits for option in options):
        notes.append(
            f"Nothing fits the {device.hbm_bytes / 1e9:.0f} GB of a device: the ring needs {ring.memory / 1e9:.0f} GB; "
            f"use {-(-ring.memory * link.size // device.hbm_bytes):.0f} devices or more."
        )
    return notes


def plan_cached(call: Call, setting: Setting, new_tokens: int) -> Plan:
    """New tokens over a cache, forward only: move the keys round, or leave them and take the queries to them.

    A step takes what its FLOPs take, or the reading of its block of keys from memory, whichever is longer. Queries
    gather, meet the keys that are there, and their outputs and lse go back in an all-to-all, to be merged.
    """
    link, device, count = setting.link, setting.hardware, setting.link.size
    block = call.itemsize * call.entry(count) * call.num_kv_heads
    pairs = new_tokens * (call.seq_len - (new_tokens / 2 if call.is_causal else 0)) / count
    work, read = 2 * call.batch * call.num_heads * call.dims * pairs / setting.rates[0], block / device.hbm_bandwidth
    queries = call.batch * new_tokens * call.num_heads
    asked, answered = queries * call.itemsize * call.head_dim, queries * (call.itemsize * call.value_dim + 4)
    moving = max(work, count * read)  # every device reads all keys for its own queries
    waits = (count - 1) * max(0.0, link.hop(block) - moving / count)
    fetch = link.gather(asked) + link.exchange(answered)
    part = (count - 1) / count
    options = [
        _forward_only("ring", moving + waits, waits, (count - 1) * block, 2 * block, device),
        _forward_only("queries", max(work, read) + fetch, fetch, (asked + answered) * part, block + asked, device),
    ]
    ring, queries = options
    kv_share = call.num_kv_heads / call.num_heads
    keys = costs.keys_should_travel(
        new_tokens=new_tokens,
        cached_tokens=call.seq_len - new_tokens,
        num_devices=count,
        kv_share=kv_share,
        itemsize=call.itemsize,
        flops=setting.rates[0],
        rate=link.hop_rate(),
    )
    pays = keys and count > 1 and ring.total_s <= 1.02 * queries.total_s
    share = f"{new_tokens:,} new of {call.seq_len:,} tokens ({new_tokens / call.seq_len:.2%})"
    stay = (
        f"the ring does not pay: {ring.sent_forward / 1e6:,.0f} MB of cache would pass {share}; keys should travel "
        f"from {2 * kv_share:.1%} on. Leave keys where they are, take queries to them, and combine with ring_jax.merge"
    )
    memory_bound = "Decoding reads the cache once and computes next to nothing: memory bound."
    return Plan(
        strategy="ring" if pays else "queries",
        reason=f"{share} are enough work to hide the keys' hops" if pays else stay,
        ring_pays=pays,
        options=tuple(sorted(options, key=lambda option: option.total_s)),
        local_length=call.seq_len // count,
        hidden_length=setting.hidden_length(call),
        hardware=device.name,
        link=link.words,
        num_devices=count,
        notes=() if new_tokens > 1 else (memory_bound,),
    )


def _forward_only(
    strategy: str, seconds: float, exposed: float, sent: float, memory: float, device: Hardware
) -> Option:
    return Option(
        strategy=strategy,
        forward_s=seconds,
        backward_s=0.0,
        exposed_s=exposed,
        sent_forward=sent,
        sent_backward=0.0,
        memory=memory,
        fits=memory <= device.hbm_bytes,
    )
