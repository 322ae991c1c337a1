"""A worker as the supervisor sees one: speaks the protocol, trains nothing.

Plain python and one store client per thread; behaviour is chosen by the command line.
"""

import argparse
import itertools
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from elastane._env import elastic_launch
from elastane.protocol import (
    INBOX,
    NOW,
    Beat,
    Broken,
    Done,
    Entered,
    Generation,
    Hello,
    Leaving,
    Ready,
    beat_key,
)

FOR_EVER = timedelta(days=1)


def connect(address):
    """Wait for the store with plain sockets first: torch is loud about every failed try."""
    host, _, port = address.rpartition(":")
    limit = timedelta(seconds=1)
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
            client = dist.TCPStore(
                host, int(port), is_master=False, wait_for_workers=False, timeout=limit
            )
        except (OSError, dist.DistError):
            time.sleep(0.05)
        else:
            client.set_timeout(FOR_EVER)
            return client


class ScriptedWorker:
    def __init__(self, options):
        self.options = options
        self.launch = elastic_launch()
        self.generation = Generation()
        self.step = 0
        self.is_ready = False
        self.leave = threading.Event()
        self.store = connect(self.launch.store)

    def push(self, fact):
        self.store.queue_push(INBOX, fact.to_json())

    def say_hello(self):
        launch = self.launch
        inside = self.generation.number > 0
        record = asdict(self.generation) if inside else {}
        self.push(
            Hello(
                worker=launch.worker,
                agent=launch.agent,
                slot=launch.slot,
                pid=os.getpid(),
                host=socket.gethostname(),
                generation=record,
            )
        )
        if self.is_ready and not inside:
            self.push(Ready(worker=launch.worker))

    def beat(self):
        store = connect(self.launch.store)
        for count in itertools.count(1):
            beat = Beat(
                count=count,
                generation=self.generation.number,
                step=self.step,
                arrived=self.step,
                status={"lr": 0.5, "progress": float(self.step)},
            )
            try:
                store.set(beat_key(self.launch.worker), beat.to_json())
            except dist.DistError:
                store = connect(self.launch.store)
            time.sleep(0.05)

    def newest(self):
        if self.store.check([NOW]):
            return Generation.from_json(self.store.get(NOW))
        return Generation()

    def follow(self):
        """Take part in the newest generation; return whether to go on."""
        me = self.launch.worker
        newest = self.newest()
        if newest.number <= self.generation.number:
            return True
        if me in newest.dismissed or newest.cause == "stop":
            return False
        if me in newest.members:
            self.generation = newest
            self.step += 1
            print(f"generation {newest.number}: {newest.members}", flush=True)
            self.push(Entered(worker=me, generation=newest.number, step=self.step, source=me))
            if self.options.breaks_once and newest.number == 1:
                self.push(Broken(worker=me, generation=1, why="as told"))
        elif self.generation.number or me in newest.lost:
            self.generation = Generation(number=newest.number)
            self.push(Ready(worker=me))
        return True

    def run(self):
        me = self.launch.worker
        self.say_hello()
        threading.Thread(target=self.beat, daemon=True).start()
        self.is_ready = True
        self.push(Ready(worker=me))
        signal.signal(signal.SIGUSR1, lambda *_: self.leave.set())
        while True:
            try:
                if not self.follow():
                    os._exit(0)
                if self.leave.is_set():
                    self.leave.clear()
                    self.push(Leaving(worker=me, why="told by a signal"))
                if self.generation.members and self.step >= self.options.steps:
                    self.push(Done(worker=me, step=self.step))
                    os._exit(0)
            except dist.DistError:
                self.store = connect(self.launch.store)
                self.say_hello()
            if self.options.steps < 10**6:
                self.step += 1
            time.sleep(0.01)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10**9)
    parser.add_argument("--breaks-once", action="store_true")
    parser.add_argument("--dies-at-start", action="store_true")
    options = parser.parse_args()
    if options.dies_at_start:
        print("no luck today", file=sys.stderr)
        sys.exit(3)
    ScriptedWorker(options).run()


if __name__ == "__main__":
    main()
