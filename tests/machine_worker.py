"""A worker that `elastane run` starts on a machine of a test: that of the elastic tests."""

import argparse
from pathlib import Path

import torch
from elastic_worker import Options, Recorder, build_model, build_session, digest, train
from training import Digits

from elastane._env import elastic_launch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    launch = elastic_launch()
    assert launch is not None
    torch.set_num_threads(1)
    options = Options(step_s=0.02)
    recorder = Recorder(folder, launch)
    model = build_model(options, worker=launch.worker)
    dataset = Digits(options.num_samples)
    session, optimizer, average = build_session(options, model=model, dataset=dataset)
    with session:
        train(session, optimizer, average, options=options, recorder=recorder, dataset=dataset)
        recorder.write(
            "end", correct=0, digest=digest(session, optimizer), position=session.position
        )


if __name__ == "__main__":
    main()
