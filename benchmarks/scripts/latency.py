"""Measures how much a network latency of 5 ms slows down the training steps of two ranks.

Two network namespaces stand for two hosts, each with one rank. A process carries the packets
between their TUN devices and delays each packet if a rank asks for a delay. Needs Linux and root.

    sudo python benchmarks/scripts/latency.py --json benchmarks/results/cpu-epyc/latency.json
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import fcntl
import itertools
import json
import mmap
import multiprocessing
import os
import select
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dpflash.bench.environment import environment
from dpflash.bench.isolated import Place
from dpflash.bench.output import write_text
from dpflash.bench.scaling_tasks import PrivateTraining, TrainingCase, plain_step

HOSTS, LINK = ("dpflash-a", "dpflash-b"), "tun0"
ADDRESSES, PORT = ("10.79.0.1", "10.79.0.2"), 29517
PACKET = 9000  # bytes, as in the networks of clusters
SECONDS = 5e-3
ROUNDS, WARM_UP, STEPS = 3, 3, 5  # connections per delay; steps in one: untimed, timed
CASES = {
    "replicated": TrainingCase("replicated", batch=16, tokens=512),
    "replicated, B = 64": TrainingCase("replicated", batch=64, tokens=512),
    "fsdp2": TrainingCase("fsdp2", batch=16, tokens=512),
    "context": TrainingCase("context", batch=1, tokens=8192),
}
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000


class Delay:
    """The delay of packets in seconds, which processes share through a file."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 8)

    @property
    def seconds(self) -> float:
        return struct.unpack("d", self._bytes[:8])[0]

    @seconds.setter
    def seconds(self, value: float) -> None:
        self._bytes[:8] = struct.pack("d", value)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[int]]:
    """Make two namespaces with a TUN device each; yield file descriptors of the devices."""
    ends: list[int] = []
    try:
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            ip("netns", "add", host)
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            ends.append(end)
            fcntl.ioctl(
                end, _TUNSETIFF, struct.pack("16sH22x", host.encode(), _IFF_TUN | _IFF_NO_PI)
            )
            ip("link", "set", host, "netns", host, "name", LINK, "mtu", str(PACKET))
            ip("-n", host, "link", "set", LINK, "txqueuelen", "10000")
            ip("-n", host, "addr", "add", f"{address}/24", "dev", LINK)
            for link in ("lo", LINK):
                ip("-n", host, "link", "set", link, "up")
            # As usual for distant hosts, an idle connection keeps its speed.
            setting = "net.ipv4.tcp_slow_start_after_idle=0"
            ip("netns", "exec", host, "sysctl", "-qw", setting)
        yield ends
    finally:
        for end in ends:
            os.close(end)
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False)


def carry(ends: list[int], path: str) -> None:
    """Carry packets both ways; each packet has the delay that is set when it arrives."""
    delay = Delay(path)
    late: dict[int, collections.deque[tuple[float, bytes]]]
    late = {end: collections.deque() for end in ends}
    other = dict(zip(ends, reversed(ends), strict=True))
    while True:
        due = [packets[0][0] for packets in late.values() if packets]
        wait = max(0.0, min(due) - time.monotonic()) if due else 1.0
        for end in select.select(ends, [], [], wait)[0]:
            at = time.monotonic() + delay.seconds
            with contextlib.suppress(BlockingIOError):
                while True:
                    late[other[end]].append((at, os.read(end, PACKET)))
        now = time.monotonic()
        for end, packets in late.items():
            while packets and packets[0][0] <= now:
                os.write(end, packets.popleft()[1])


def run_rank(rank: int, path: str) -> None:
    """Run steps; rank 0 prints the seconds of each step by case, step and delay as JSON.

    Each delay has its own connections, since TCP fits its windows to a connection's first packets.
    """
    torch.set_num_threads(1)
    place, delay = Place(rank, 2, torch.device("cpu")), Delay(path)
    found: dict[str, dict[str, list[float]]] = {name: {} for name in CASES}
    for number, (_, seconds) in enumerate(itertools.product(range(ROUNDS), (0.0, SECONDS))):
        delay.seconds = seconds
        address = f"tcp://{ADDRESSES[0]}:{PORT + number}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        for name, case in CASES.items():
            steps = {
                "private": PrivateTraining(place, case).step,
                "plain": plain_step(place, case),
            }
            for turn, kind in itertools.product(range(WARM_UP + STEPS), steps):
                place.barrier()
                begin = time.perf_counter()
                steps[kind]()
                if turn >= WARM_UP:
                    times = found[name].setdefault(f"{kind} {1e3 * seconds:g} ms", [])
                    times.append(time.perf_counter() - begin)
                place.barrier()
            if rank == 0:
                shown = {key: statistics.median(own) for key, own in found[name].items()}
                print(name, shown, file=sys.stderr)
        dist.destroy_process_group()
    delay.seconds = 0.0
    if rank == 0:
        print(json.dumps(found))


def measure() -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(prefix="dpflash-delay-") as file, two_hosts() as ends:
        file.write(struct.pack("d", 0.0))
        file.flush()
        carrier = multiprocessing.Process(target=carry, args=(ends, file.name), daemon=True)
        carrier.start()
        given = {"GLOO_SOCKET_IFNAME": LINK}
        ranks = []
        for rank, host in enumerate(HOSTS):
            words = ["ip", "netns", "exec", host, sys.executable, __file__, "--delay", file.name]
            ranks.append(
                subprocess.Popen(
                    [*words, "--rank", str(rank)],
                    env={**os.environ, **given},
                    stdout=subprocess.PIPE,
                )
            )
        shown = [rank.communicate()[0] for rank in ranks]
        carrier.kill()
        if any(rank.returncode for rank in ranks):
            raise SystemExit("a rank failed")
        return json.loads(shown[0])


def ratios(times: dict[str, list[float]]) -> dict[str, float]:
    """Return the median ratio of steps with delay to steps without, by kind of step."""
    found = {}
    for kind in ("private", "plain"):
        prompt, late = times[f"{kind} 0 ms"], times[f"{kind} {1e3 * SECONDS:g} ms"]
        found[kind] = statistics.median(b / a for a, b in zip(prompt, late, strict=True))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file of the results")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--delay", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        return run_rank(args.rank, args.delay)
    found = measure()
    rows = [
        {"scheme": name, "ratio": ratios(times), "seconds": times} for name, times in found.items()
    ]
    for row in rows:
        print(row["scheme"], row["ratio"])
    if args.json is not None:
        config = {
            "one_way_ms": 1e3 * SECONDS,
            "connections": ROUNDS,
            "steps": STEPS,
            "packet_bytes": PACKET,
        }
        given = {"environment": environment("cpu", 1), "config": config, "rows": rows}
        write_text(args.json, json.dumps(given, indent=1) + "\n")


if __name__ == "__main__":
    main()
