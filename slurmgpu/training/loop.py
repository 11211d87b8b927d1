"""The loop: what a user's class describes is trained, evaluated, checkpointed and taken up again."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from slurmgpu.errors import Interrupted, SlurmGPUError
from slurmgpu.training import states
from slurmgpu.training.batches import Cutting, Step, derive_seed
from slurmgpu.training.checkpoints import Checkpoint, Checkpoints, save_weights
from slurmgpu.training.curves import Curve
from slurmgpu.training.evaluating import Evaluator, Watch
from slurmgpu.training.loading import Loader, Reader, TrainReadings, read_split
from slurmgpu.training.modes import Mode, computing, device_of, join
from slurmgpu.training.optimizing import Stepper, check_trainable, n_parameters
from slurmgpu.training.outcome import Outcome, Standing
from slurmgpu.training.pacing import Pace
from slurmgpu.training.places import Place
from slurmgpu.training.ranks import led
from slurmgpu.training.settings import AUTO, TrainingSettings
from slurmgpu.training.sizing import Counter, fit_batch_size, peak_memory
from slurmgpu.training.throughput import throughput

__all__ = ["Outcome", "Training"]

LAST, BEST = "last.pt", "best.pt"
MOST_POINTS = 500
"""Of a learning curve, unless `log_steps` says how many."""


class Training:
    """A training of what `user` describes, in `folder`, where its checkpoints and its weights lie.

    `user` has `model()`, `data(split)`, `loss(model, batch)`, and may have `metrics(model, batch)`,
    `optimizer(model)`, `scheduler(optimizer, n_steps)`, `collate(samples)`, `tokens(batch)`, `flops(batch)` and
    `blocks(model)`: docs/how-to/train-a-model.md says what each returns.
    """

    def __init__(self, user: Any, settings: TrainingSettings, place: Place, folder: Path) -> None:
        self._user, self._settings, self._place, self._folder = user, settings, place, folder
        self._seed = settings.seed or 0
        self._device = device_of(place)
        self._standing = Standing()
        self._furthest = 0
        self._final: dict[str, float] = {}
        self._open: list[Evaluator | Loader] = []

    def run(self) -> Outcome:
        """Train to the end, from the last checkpoint if there is one.

        Raises Interrupted, on all ranks and after a checkpoint, when `place.stopping()`; an ItemError when the loss is
        no number any more.
        """
        self._since = time.monotonic()
        join(self._place)
        try:
            with computing(self._settings, self._device):
                self._build()
                self._resume()
                self._train()
                return self._finish()
        finally:
            for each in self._open:
                each.close()

    # What is trained

    def _build(self) -> None:
        settings, place = self._settings, self._place
        samples = read_split(self._user, "train")
        assert samples is not None
        self._samples = samples
        states.seed_everything(self._seed)
        model = self._user.model()
        check_trainable(self._user, model)
        self._n_parameters = n_parameters(model.parameters())
        self._mode = Mode(self._user, model, settings, place)
        self._checkpoints = Checkpoints(self._folder, place, settings.keep_checkpoints)
        self._checkpoint = self._checkpoints.last()
        self._saved = self._checkpoint.shared() if self._checkpoint else {}
        self._batch_size = self._choose_batch_size(samples)
        self._cutting = self._cut(len(samples))
        self._n_steps = self._cutting.n_steps()
        self._stepper = Stepper(self._user, self._mode.model, settings, self._cutting)
        self._curve = Curve(settings.log_steps or -(-self._n_steps // MOST_POINTS) or 1, self._device, place)
        self._watch = Watch(settings)
        self._pace = Pace(settings, place, self._device)
        self._meter = throughput(self._mode.forward, device=self._device, precision=settings.precision)
        self._counter = Counter(self._user, self._mode, settings, self._meter)
        self._validation, self._test = self._evaluator("val"), self._evaluator("test")
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def _cut(self, n_samples: int) -> Cutting:
        settings, place = self._settings, self._place
        step_size = settings.global_batch_size or self._batch_size * settings.accumulation * place.world_size
        cutting = Cutting(
            n_samples,
            step_size,
            self._batch_size,
            epochs=settings.epochs,
            steps=settings.steps,
            drop_last=settings.drop_last,
            rank=place.rank,
            world_size=place.world_size,
        )
        if not cutting.epoch_size:
            raise SlurmGPUError(
                f"the {n_samples} training samples make no step of {step_size}, and drop_last leaves out what makes "
                "none: take a smaller batch_size, or drop_last = false."
            )
        return cutting

    def _choose_batch_size(self, samples: Reader) -> int:
        if self._settings.batch_size != AUTO:
            return int(self._settings.batch_size)
        found = self._saved.get("batch_size")
        return found or fit_batch_size(self._user, self._mode, samples, self._settings, self._place)

    def _evaluator(self, split: str) -> Evaluator | None:
        reader = read_split(self._user, split)
        if reader is None:
            return None
        evaluator = Evaluator(self._mode, reader, split, self._settings, self._batch_size, self._place)
        self._open.append(evaluator)
        return evaluator

    # The loop

    def _train(self) -> None:
        standing = self._standing
        measured = self._validation.names() if self._validation else []
        self._watch.check(["train_loss", *measured])  # now, and not after the first epoch
        self._evaluate_if_due(standing.step > 0 and standing.sample == 0)  # it was interrupted in this
        readings = TrainReadings(self._cutting, self._seed, standing.position, standing.step)
        loader = Loader(self._samples, readings, self._settings, self._device)
        self._open.append(loader)
        self._batches = iter(loader)
        for step in self._cutting.plan(standing.position, standing.step):
            if standing.early:
                break
            self._take(step)
            epoch_ends = step.after.epoch > step.epoch
            self._evaluate_if_due(epoch_ends)
            if self._pace.due() or epoch_ends:
                self._meet(epoch_ends)

    def _take(self, step: Step) -> None:
        """One step of the optimizer."""
        standing, scaler = self._standing, self._stepper.scaler
        self._stepper.prepare(standing.position, standing.step)
        with self._meter.step(samples=sum(each.n for each in step.micro_batches)):
            for each in step.micro_batches:
                with self._meter.data():
                    batch = next(self._batches)
                self._mode.first_pass(batch)
                self._counter.count(batch, each)
                with self._mode.gathering(each is step.micro_batches[-1]):
                    loss = self._mode.forward(batch)
                    scaler.scale(loss if each.weight == 1 else loss * each.weight).backward()
                self._curve.add(loss, each.n)
            self._stepper.step()
        standing.step += 1
        standing.epoch, standing.sample = step.after
        standing.samples += step.n
        self._curve.end_step(standing.step, step.n, last=standing.step == self._n_steps)

    def _evaluate_if_due(self, epoch_ends: bool) -> None:
        standing, every = self._standing, self._settings.eval_steps
        is_last = self._n_left() == 0
        due = is_last or (epoch_ends if every is None else standing.step % every == 0)
        if not due or standing.evaluated == standing.step:
            return
        with self._meter.pause():
            found = self._evaluate(self._validation)
            self._curve.read(standing.step)
            self._final = {"train_loss": self._curve.mean_since_evaluation(standing.step)} | found
            standing.evaluated = standing.step
            if self._watch.see(standing.step, self._final) and self._settings.keep_best:
                self._save_weights(BEST)
            standing.early = self._watch.gives_up and not is_last
        self._pace.rest()

    def _evaluate(self, evaluator: Evaluator | None) -> dict[str, float]:
        if evaluator is None:
            return {}
        try:
            return evaluator.evaluate(self._poll)
        except Interrupted:
            self._save()
            raise

    def _poll(self) -> None:
        """Ends an evaluation that is in the way."""
        if self._pace.due() and self._pace.meet().stop:
            raise Interrupted(f"in the evaluation after step {self._standing.step:,}")

    def _meet(self, epoch_ends: bool) -> None:
        """Do what rank 0 decides."""
        stop, checkpoint = self._pace.meet(epoch_ends=epoch_ends)
        self._curve.read(self._standing.step)
        if stop or checkpoint:
            self._save()
        if stop and self._n_left() and not self._standing.early:
            raise Interrupted(f"after step {self._standing.step:,}")

    def _n_left(self) -> int:
        return self._cutting.n_steps(self._standing.position, self._standing.step)

    # What is kept

    def _save(self) -> None:
        standing = self._standing
        self._curve.read(standing.step)
        with self._meter.pause():
            standing.wall_s += self._lap()
            standing.peak_memory_bytes = peak_memory(self._device, self._place, standing.peak_memory_bytes)
            state = states.model_state(self._mode.model, self._stepper.optimizer, sharded=self._mode.sharded)
            shared: dict[str, Any] = {
                "standing": asdict(standing),
                "batch_size": self._batch_size,
                "final": self._final,
                "watch": self._watch.state(),
                "curve": self._curve.state(),
                "stepper": self._stepper.state(),
                "meter": self._meter.state(together=True),
            }
            own = {
                "random": states.random_state(self._device),
                "buffers": states.buffers(self._mode.model),
                "curve": self._curve.own(),
            }
            whole, sharded = ({}, state) if self._mode.sharded else (state, None)
            cost_s = self._checkpoints.save(standing.step, shared=shared | whole, own=own, sharded=sharded)
        standing.checkpoint_s += cost_s
        self._pace.saved(cost_s)
        if self._place.leads and standing.step > self._furthest:
            self._furthest = standing.step
            self._place.progress(standing.tell(self._settings.epochs, self._curve.values))

    def _resume(self) -> None:
        own = self._load(self._checkpoint) if self._checkpoint else None
        self._furthest = self._standing.step
        if own is None:
            states.seed_everything(derive_seed(self._seed, self._standing.step, self._place.rank))

    def _load(self, checkpoint: Checkpoint) -> dict[str, Any] | None:
        shared, own = self._saved, checkpoint.own()
        self._saved = {}
        model, optimizer, sharded = self._mode.model, self._stepper.optimizer, self._mode.sharded
        if sharded:
            state = states.model_state(model, optimizer, sharded=True)
            checkpoint.load_sharded(state)
        else:
            state = {name: shared[name] for name in ("model", "optimizer")}
        states.load_model_state(model, optimizer, state, sharded=sharded)
        self._standing = Standing(**shared["standing"])
        self._standing.resumed += 1
        self._final = shared["final"]
        self._watch.load(shared["watch"])
        self._curve.load(shared["curve"], own and own["curve"])
        self._stepper.load(shared["stepper"])
        self._meter.load(shared["meter"])
        if own is not None:
            states.load_buffers(model, own["buffers"])
            states.set_random_state(own["random"], self._device)
        return own

    def _save_weights(self, name: str) -> None:
        weights = states.weights(self._mode.model, sharded=self._mode.sharded)
        led(self._place, lambda: save_weights(self._folder / name, weights))

    # What came of it

    def _finish(self) -> Outcome:
        standing = self._standing
        rates = self._meter.summary(together=True)
        tested = self._evaluate(self._test)
        self._save_weights(LAST)
        best_tested = tested
        if self._test is not None and self._settings.keep_best and self._watch.best_step not in (-1, standing.step):
            best_tested = self._test_best(self._test)
        return Outcome(
            steps=standing.step,
            epochs=standing.epoch + standing.sample / self._cutting.epoch_size,
            samples=standing.samples,
            final=self._final | tested,
            best=self._watch.best | (best_tested if self._settings.keep_best else {}),
            best_step=self._watch.best_step,
            metric=self._watch.metric,
            score=self._watch.score,
            ended="early" if standing.early else "finished",
            curve_steps=self._curve.steps,
            curve=self._curve.values,
            eval_steps=self._watch.steps,
            eval_curve=self._watch.curve,
            wall_s=standing.wall_s + self._lap(),
            data_s=rates.data_s,
            checkpoint_s=standing.checkpoint_s,
            samples_per_s=rates.samples_per_s,
            tokens_per_s=rates.tokens_per_s,
            mfu=rates.mfu,
            peak_memory_bytes=peak_memory(self._device, self._place, standing.peak_memory_bytes),
            world_size=self._place.world_size,
            batch_size=self._batch_size,
            resumed=standing.resumed,
            n_parameters=self._n_parameters,
        )

    def _test_best(self, test: Evaluator) -> dict[str, float]:
        """The best weights on the test split; the last ones are in their file."""
        self._mode.load_weights(self._folder / BEST)
        try:
            return test.evaluate(self._poll)
        except Interrupted:
            self._mode.load_weights(self._folder / LAST)
            self._save()
            raise

    def _lap(self) -> float:
        """Seconds since the last lap."""
        before, self._since = self._since, time.monotonic()
        return self._since - before
