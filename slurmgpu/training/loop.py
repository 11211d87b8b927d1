"""The training loop: train, evaluate, checkpoint and resume what a user's class describes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slurmgpu.errors import Interrupted
from slurmgpu.training import states
from slurmgpu.training.batch_counter import BatchCounter
from slurmgpu.training.batch_size import fit_batch_size
from slurmgpu.training.batches import Step, derive_seed, plan_steps
from slurmgpu.training.best_weights import BestWeights
from slurmgpu.training.checkpoint_files import save_weights
from slurmgpu.training.checkpoints import Checkpoints
from slurmgpu.training.data_loader import BatchLoader, TrainBatchSampler
from slurmgpu.training.evaluation import Evaluator
from slurmgpu.training.learning_curve import LearningCurve
from slurmgpu.training.loss_weights import LossWeights
from slurmgpu.training.metric_monitor import MetricMonitor
from slurmgpu.training.optimizer import Stepper, check_trainable, n_parameters
from slurmgpu.training.outcome import Outcome
from slurmgpu.training.progress import Progress, ProgressReporter
from slurmgpu.training.ranks import Place, on_rank_zero
from slurmgpu.training.resumption import UNKNOWN, Version, advising_on, checkpoint_to_resume
from slurmgpu.training.settings import AUTO, TrainingSettings
from slurmgpu.training.splits import Splits
from slurmgpu.training.step_batches import StepBatches
from slurmgpu.training.strategy import Strategy, init_process_group
from slurmgpu.training.sync_schedule import SyncSchedule
from slurmgpu.training.throughput import throughput
from slurmgpu.training.torch_settings import torch_settings
from slurmgpu.training.training_state import TrainingState

LAST = "last.pt"
MOST_POINTS = 500
"""The largest number of points of a learning curve, unless `log_steps` is set."""


class Training:
    """Trains what `user` describes, with checkpoints and weights in `folder`.

    `user` has `model()`, `data(split)`, `loss(model, batch)`, and may have `metrics(model, batch)`, `weight(batch)`,
    `optimizer(model)`, `scheduler(optimizer, n_steps)`, `collate(samples)`, `tokens(batch)`, `flops(batch)` and
    `blocks(model)`: docs/how-to/train-a-model.md has their results.
    """

    def __init__(
        self, user: Any, settings: TrainingSettings, place: Place, folder: Path, version: Version = UNKNOWN
    ) -> None:
        self._user, self._settings, self._place, self._folder = user, settings, place, folder
        self._version = version
        self._seed = settings.seed or 0
        self._progress = Progress()
        self._open: list[Evaluator | BatchLoader] = []

    def run(self) -> Outcome:
        """Train to the end, from the last checkpoint if there is one.

        Raises Interrupted, on all ranks and after a checkpoint, when `place.stopping()`; ItemError if the loss is not
        finite.
        """
        self._since = time.monotonic()
        init_process_group(self._place)
        try:
            with torch_settings(self._settings):
                self._set_up()
                self._train()
                return self._finish()
        finally:
            for each in self._open:
                each.close()

    # Set-up

    def _set_up(self) -> None:
        settings, place, progress = self._settings, self._place, self._progress
        self._splits = Splits(self._user, self._seed, place)
        states.seed_everything(self._seed)
        model = self._user.model()
        check_trainable(self._user, model)
        model.train()  # from_pretrained() returns models in evaluation mode
        self._n_parameters = n_parameters(model.parameters())
        self._strategy = Strategy(self._user, model, settings, place)
        device = self._strategy.device
        checkpoints = Checkpoints(self._folder, place, settings.keep_checkpoints)
        checkpoint, found = checkpoint_to_resume(checkpoints, self._version)
        if checkpoint:
            with advising_on(found, self._version):
                self._splits.check_unchanged(found["sizes"])
        self._batch_size = self._choose_batch_size(found.get("batch_size"))
        self._step_plan = plan_steps(len(self._splits.train), self._batch_size, settings, place)
        self._n_steps = self._step_plan.n_steps()
        first = replace(self._step_plan, step_size=found.get("step_size", self._step_plan.step_size))
        self._stepper = Stepper(self._user, self._strategy.model, settings, self._step_plan, first)
        self._loss_weights = LossWeights(self._user, place, device)
        log_steps = settings.log_steps or -(-self._n_steps // MOST_POINTS) or 1
        self._curve = LearningCurve(log_steps, device, place, lambda: self._loss_weights.problem)
        self._monitor, self._best = MetricMonitor(settings), BestWeights(self._folder, place, self._strategy)
        self._sync = SyncSchedule(settings, place, self._n_parameters)
        self._reporter = ProgressReporter(place, settings.epochs, progress, self._curve)
        self._meter = throughput(self._strategy.forward, device=device, precision=settings.precision)
        self._counter = BatchCounter(self._user, self._strategy, settings, self._meter)
        self._validation, self._test = self._evaluator("val"), self._evaluator("test")
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        given = {
            "batch_size": self._batch_size,
            "step_size": first.step_size,
            "sizes": self._splits.sizes,
            "code": self._version.code,
        }
        self._state = TrainingState(
            checkpoints,
            progress,
            self._strategy,
            self._stepper,
            self._curve,
            self._monitor,
            self._best,
            self._meter,
            given,
        )
        has_random = False
        if checkpoint:
            with advising_on(found, self._version):
                has_random = self._state.load(checkpoint, found)
            progress.resumed += 1
            self._reporter.resumed()
        else:
            self._best.clear()
        if not has_random:
            states.seed_everything(derive_seed(self._seed, progress.step, place.rank))

    def _choose_batch_size(self, before: int | None) -> int:
        if self._settings.batch_size != AUTO:
            return int(self._settings.batch_size)
        return before or fit_batch_size(self._user, self._strategy, self._splits.train, self._settings, self._place)

    def _evaluator(self, split: str) -> Evaluator | None:
        dataset = self._splits.get(split)
        if dataset is None:
            return None
        evaluator = Evaluator(
            self._strategy, dataset, split, self._settings, self._batch_size, self._place, self._loss_weights
        )
        self._open.append(evaluator)
        return evaluator

    # The loop

    def _train(self) -> None:
        progress = self._progress
        measured = self._validation.names() if self._validation else []
        self._monitor.choose_metric(["train_loss", *measured])  # before the first epoch, not after it
        progress.start_s += time.monotonic() - self._since  # no lap has ended yet
        at_end = progress.step > 0 and progress.sample == 0
        if self._evaluation_is_due(at_end):  # it was interrupted
            self._end_step(at_end)
        sampler = TrainBatchSampler(self._step_plan, self._seed, progress.position, progress.step)
        loader = BatchLoader(self._splits.train, sampler, self._settings, self._strategy.device)
        self._open.append(loader)
        self._step_batches = StepBatches(loader, self._loss_weights, self._meter)
        self._sync.restart_clock()
        self._reporter.restart_clock()
        for step in self._step_plan.remaining(progress.position, progress.step):
            if progress.early:
                break
            self._train_step(step)
            self._end_step(step.after.epoch > step.epoch)

    def _train_step(self, step: Step) -> None:
        progress, scaler = self._progress, self._stepper.scaler
        self._stepper.prepare(progress.position, progress.step)
        with self._meter.step(samples=sum(each.n for each in step.micro_batches)):
            for each, batch, factor in self._step_batches.of(step):
                self._strategy.first_pass(batch)
                self._counter.count(batch, each)
                with self._strategy.gradient_sync(each is step.micro_batches[-1]):
                    loss = self._strategy.forward(batch)
                    scaler.scale(_scaled(loss, factor)).backward()
                self._curve.add(loss, factor * (step.n / self._place.world_size) if self._loss_weights else each.n)
            self._stepper.step(step.after, progress.step + 1)
        progress.step += 1
        progress.epoch, progress.sample = step.after
        progress.samples += step.n
        self._curve.end_step(progress.step, step.n, last=progress.step == self._n_steps)

    def _end_step(self, epoch_ends: bool) -> None:
        """Evaluate if due, and follow rank 0's decisions."""
        progress = self._progress
        due, evaluates = self._sync.due(), self._evaluation_is_due(epoch_ends)
        found = self._evaluate(self._validation) if evaluates else {}
        if not (due or evaluates or epoch_ends):
            return
        # One collective for the curve and the decision.
        stop, checkpoint = self._sync.decide(
            lambda extras: self._curve.read(progress.step, extras), epoch_ends=epoch_ends
        )
        self._reporter.read()
        if evaluates:
            self._record_evaluation(found)
        self._reporter.stepped()
        if stop or checkpoint:
            self._save()
        if stop and self._n_steps_left() and not progress.early:
            raise Interrupted(f"after step {progress.step:,}")

    def _n_steps_left(self) -> int:
        return self._step_plan.n_steps(self._progress.position, self._progress.step)

    # Evaluation

    def _evaluation_is_due(self, epoch_ends: bool) -> bool:
        progress, every = self._progress, self._settings.eval_steps
        due = (epoch_ends if every is None else progress.step % every == 0) or self._n_steps_left() == 0
        return due and progress.evaluated != progress.step

    def _evaluate(self, evaluator: Evaluator | None, restore: Callable[[], None] = lambda: None) -> dict[str, float]:
        """The results of a split; {} without one. If interrupted, calls `restore` and saves a checkpoint."""
        if evaluator is None:
            return {}
        started = time.monotonic()
        self._sync.restart_clock()
        try:
            try:
                with self._meter.pause():
                    return evaluator.evaluate(self._interrupt_if_stopping)
            finally:
                self._progress.evaluation_s += time.monotonic() - started
                self._sync.restart_clock()
                self._reporter.restart_clock()
        except Interrupted:
            restore()
            self._save()
            raise

    def _interrupt_if_stopping(self) -> None:
        """Interrupt the evaluation if the training must stop."""
        if self._sync.due(evaluating=True) and self._sync.decide(self._curve.summed, evaluating=True).stop:
            raise Interrupted(f"in the evaluation after step {self._progress.step:,}")

    def _record_evaluation(self, found: dict[str, float]) -> None:
        progress = self._progress
        progress.final = {"train_loss": self._curve.mean_since_evaluation(progress.step)} | found
        progress.evaluated = progress.step
        if self._monitor.update(progress.step, progress.final) and self._settings.keep_best:
            with self._meter.pause():
                self._best.hold(progress.step)
        self._stepper.evaluated(progress.final[self._monitor.metric])
        progress.early = self._monitor.should_stop and self._n_steps_left() > 0
        self._reporter.evaluated()

    # Checkpoints and weights

    def _save(self) -> None:
        progress = self._progress
        with self._meter.pause():
            progress.wall_s += self._lap()
            cost_s = self._state.save()
        progress.checkpoint_s += cost_s
        self._sync.saved(cost_s)
        self._reporter.saved()
        self._reporter.restart_clock()

    def _save_last(self) -> None:
        started = time.monotonic()
        weights = states.weights(self._strategy.model, sharded=self._strategy.sharded)
        on_rank_zero(self._place, lambda: save_weights(self._folder / LAST, weights))
        self._best.write()
        self._progress.checkpoint_s += time.monotonic() - started

    # Results

    def _finish(self) -> Outcome:
        progress, monitor = self._progress, self._monitor
        rates = self._meter.summary(together=True)
        tested = self._evaluate(self._test)
        self._save_last()
        best = self._finish_best(tested) if self._settings.keep_best else {}
        self._reporter.tested(tested)
        return Outcome(
            steps=progress.step,
            epochs=progress.epoch + progress.sample / self._step_plan.epoch_size,
            samples=progress.samples,
            final=progress.final | tested,
            best=monitor.best | best,
            best_step=monitor.best_step,
            metric=monitor.metric,
            score=monitor.score,
            ended="early" if progress.early else "finished",
            curve_steps=self._curve.steps,
            curve=self._curve.values,
            eval_steps=monitor.steps,
            eval_curve=monitor.curve,
            wall_s=progress.wall_s + self._lap(),
            start_s=progress.start_s,
            data_s=rates.data_s,
            compute_s=rates.compute_s,
            communication_s=rates.communication_s,
            evaluation_s=progress.evaluation_s,
            checkpoint_s=progress.checkpoint_s,
            samples_per_s=rates.samples_per_s,
            tokens_per_s=rates.tokens_per_s,
            mfu=rates.mfu,
            peak_memory_bytes=self._strategy.peak_memory(progress.peak_memory_bytes),
            world_size=self._place.world_size,
            batch_size=self._batch_size,
            resumed=progress.resumed,
            n_parameters=self._n_parameters,
        )

    def _finish_best(self, tested: dict[str, float]) -> dict[str, float]:
        """Evaluate the best weights on the test split, and rename them to `best.pt`."""
        if self._test is not None and self._monitor.best_step not in (-1, self._progress.step):
            tested = {}
            if (path := self._best.weights_file()) is not None:
                self._strategy.load_weights(path)
                tested = self._evaluate(self._test, lambda: self._strategy.load_weights(self._folder / LAST))
        self._best.finish()
        return tested

    def _lap(self) -> float:
        before, self._since = self._since, time.monotonic()
        return self._since - before


def _scaled(loss: torch.Tensor, factor: Any) -> torch.Tensor:
    if isinstance(factor, torch.Tensor):
        return loss * factor.to(loss.dtype)
    return loss if factor == 1 else loss * factor
