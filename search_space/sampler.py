"""Optuna samplers that propose only legal, unseen configurations of one branch.

A branch owns its parameters, named after it ("b07.value_tile"), so one Optuna study holds branches that came
at different times: a categorical's choices cannot grow, and a sampler that also picked the branch did no
better than random. Who picks the branch says so before each ask:

    sampler.focus(Focus("b07", index=41, relatives=("b03", "b00")))
    trial = study.ask(parameters(space, "b07"))

A proposal depends on (seed, index, finished trials, running trials) and on nothing else, so that a journal
of results replays to the same candidates. FAIL trials (trouble that was not the candidate's) do not count as
seen.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from evotune.errors import StudyError
from evotune.search_space.forest import Floats, Growth, Ints, fit
from evotune.search_space.ranks import ranks
from evotune.search_space.space import Cell, Space

_TRIES_FOR_NEW = 64


@dataclass(frozen=True)
class Focus:
    """What the next ask is for.

    Attributes:
        branch: id, the prefix of the parameter names.
        index: number of the candidate within the study; with the seed it gives all randomness.
        relatives: ancestors, nearest first, whose results say something about this branch's knobs too.
        start: exactly these knobs instead of a proposal.
        flying: trials that count as running, whatever became of them since.
    """

    branch: str
    index: int
    relatives: tuple[str, ...] = ()
    start: Any | None = None
    flying: frozenset[int] = frozenset()


def parameters(space: Space, branch: str) -> dict[str, BaseDistribution]:
    """The branch's Optuna parameters by name."""
    return {
        f"{branch}.{name}": CategoricalDistribution(values)
        for name, values in zip(space.names, space.choices, strict=True)
    }


@dataclass(frozen=True)
class Told:
    """Judged candidates of one branch.

    Attributes:
        cells: [trials, knobs] levels.
        losses: [trials, objectives] smaller is better; inf in every column where the candidate failed.
    """

    cells: Ints
    losses: Floats


class LegalSampler(BaseSampler):
    """What the samplers below share: names, legality, what was seen. Proposes uniformly.

    Args:
        space: the template's space; every branch has the same knobs.
        seed: of the study.
        primary: columns of the objectives that the search is for (the speeds); all when None.
    """

    def __init__(self, space: Space, seed: int, primary: Sequence[int] | None = None) -> None:
        self._space = space
        self._seed = seed
        self._primary = primary
        self._focus: Focus | None = None
        self._cells: dict[tuple[int, str], Cell] = {}

    def focus(self, focus: Focus) -> None:
        """Say what the next ask is for."""
        self._focus = focus

    def infer_relative_search_space(
        self, study: optuna.Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        return parameters(self._space, self._focused().branch)

    def sample_relative(
        self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        focus = self._focused()
        knobs = focus.start
        if knobs is None:
            rng = np.random.default_rng([self._seed, focus.index])
            others = (t for t in study.get_trials(deepcopy=False) if t.number != trial.number)
            trials = [_running(t) if t.number in focus.flying else t for t in others]
            mine = [t for t in trials if self._holds(t, focus.branch)]
            seen = {self._cell(t, focus.branch) for t in mine if t.state != TrialState.FAIL}
            knobs = self._space.at(self._choose(study, trials, seen, rng))
        return {f"{focus.branch}.{name}": value for name, value in self._space.encode(knobs).items()}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: BaseDistribution
    ) -> Any:
        raise StudyError(f"parameter {param_name} does not belong to branch {self._focused().branch}")

    def _choose(
        self, study: optuna.Study, trials: Sequence[FrozenTrial], seen: set[Cell], rng: np.random.Generator
    ) -> Cell:
        return self._random(seen, rng)

    def _random(self, seen: set[Cell], rng: np.random.Generator) -> Cell:
        """A uniform legal unseen cell. Where nearly all were seen, the first unseen in grid order."""
        for _ in range(_TRIES_FOR_NEW):
            (cell,) = self._space.sample_cells(rng, 1)
            if cell not in seen:
                return cell
        for knobs in self._space.legal():
            if self._space.cell(knobs) not in seen:
                return self._space.cell(knobs)
        raise StudyError(f"all {len(seen)} legal configurations of the branch were tried")

    def _focused(self) -> Focus:
        if self._focus is None:
            raise RuntimeError("focus() must be called before study.ask()")
        return self._focus

    def _holds(self, trial: FrozenTrial, branch: str) -> bool:
        return f"{branch}.{self._space.names[-1]}" in trial.params

    def _cell(self, trial: FrozenTrial, branch: str) -> Cell:
        key = (trial.number, branch)
        if key not in self._cells:
            values = {name: trial.params[f"{branch}.{name}"] for name in self._space.names}
            self._cells[key] = self._space.cell(self._space.decode(values))
        return self._cells[key]

    def _told(self, study: optuna.Study, trials: Sequence[FrozenTrial], branch: str) -> Told:
        signs = np.array([-1.0 if d == StudyDirection.MAXIMIZE else 1.0 for d in study.directions])
        judged = [t for t in trials if t.state in (TrialState.COMPLETE, TrialState.PRUNED)]
        mine = [t for t in judged if self._holds(t, branch)]
        bad = np.full(len(signs), np.inf)
        losses = [signs * t.values if t.state == TrialState.COMPLETE else bad for t in mine]
        cells = np.array([self._cell(t, branch) for t in mine], dtype=np.int64)
        width = len(self._space.names)
        return Told(cells.reshape(-1, width), np.array(losses).reshape(-1, len(signs)))


@dataclass(frozen=True)
class PoolPlan:
    """Numbers of `LegalPoolSampler`, set on spaces of the FAIR benchmark hub (see `experiments/`).

    Attributes:
        startup: judged candidates, ancestors' included, before the model speaks.
        drawn: random legal cells in the pool.
        shared: candidates in a row with the same random cells. Where one cell in thirteen is legal, drawing
            500 takes 90 ms of Python, which a judge's threads in the same process wait for; a proposal takes
            a twentieth of that once they are drawn, and is as good: 0.954 of the optimum's speed after 60
            candidates where it was 0.951, mean over 24 measured spaces, 3 seeds.
        centres: best cells whose neighbours join the pool.
        good: part of the judged that counts as good.
        random: chance of a uniform proposal, so that no region is lost for ever.
        inherited: weight of an ancestor's results beside a branch without results of its own; halves with
            every `startup` own results.
        newest: judged candidates of a branch that the model sees, so that cost stays flat.
    """

    startup: int = 10
    drawn: int = 500
    shared: int = 16
    centres: int = 5
    good: float = 0.15
    random: float = 0.08
    inherited: float = 0.5
    newest: int = 400


class LegalPoolSampler(LegalSampler):
    """Scores a pool of legal unseen cells by how often a forest takes them for good ones.

    The pool is random cells, the best cells of the branch and of its ancestors, and their neighbours. "Good"
    is the best 15 % after a random weighting of the objectives per proposal (all speeds alike, or one of
    them), by rank, so that units and scales do not matter; failures are never good. This is the classifier
    form of expected improvement (LFBO, Song et al. 2022), as Helion's tuner uses it.
    """

    def __init__(
        self, space: Space, seed: int, primary: Sequence[int] | None = None, plan: PoolPlan | None = None
    ) -> None:
        super().__init__(space, seed, primary)
        self._plan = plan or PoolPlan()
        self._block: tuple[int, list[Cell]] = (-1, [])

    def _choose(
        self, study: optuna.Study, trials: Sequence[FrozenTrial], seen: set[Cell], rng: np.random.Generator
    ) -> Cell:
        focus, plan = self._focused(), self._plan
        own = _newest(self._told(study, trials, focus.branch), plan.newest)
        family = [_newest(self._told(study, trials, name), plan.newest) for name in focus.relatives]
        known = len(own.cells) + sum(len(told.cells) for told in family)
        if known < plan.startup or rng.random() < plan.random:
            return self._random(seen, rng)
        weights = _weighting(len(study.directions), self._primary, rng)
        fade = plan.inherited * 0.5 ** (len(own.cells) / plan.startup)
        lessons = [_lesson(own, weights, 1.0, plan.good)]
        lessons += [_lesson(told, weights, fade / (1 + i), plan.good) for i, told in enumerate(family)]
        lessons = [lesson for lesson in lessons if len(lesson.cells) and lesson.mass.any()]
        pool = [cell for cell in self._pool(lessons, rng) if cell not in seen]
        if not pool or not any(lesson.target.any() for lesson in lessons):
            return self._random(seen, rng)
        forest = fit(
            np.concatenate([lesson.cells for lesson in lessons]),
            np.concatenate([lesson.target for lesson in lessons]),
            np.concatenate([lesson.mass for lesson in lessons]),
            rng,
            Growth(),
        )
        score = forest.predict(np.array(pool, dtype=np.int64)).mean(axis=0)
        return pool[int(np.argmax(score + 1e-9 * rng.random(len(pool))))]

    def _pool(self, lessons: Sequence["_Lesson"], rng: np.random.Generator) -> list[Cell]:
        """Random cells; for each lesson its best cells, their neighbours and some cells two knobs away."""
        space = self._space
        pool = self._drawn(self._focused().index // self._plan.shared)
        for lesson in lessons:
            for i in lesson.best[: self._plan.centres]:
                centre = tuple(lesson.cells[i].tolist())
                near = space.neighbour_cells(centre)
                pool += [centre, *near]
                for pick in rng.integers(len(near), size=10) if near else ():
                    further = space.neighbour_cells(near[pick])
                    pool += [further[j] for j in rng.integers(len(further), size=10)] if further else []
        return list(dict.fromkeys(pool))

    def _drawn(self, block: int) -> list[Cell]:
        """The random cells of a block of candidates; the last block's are kept."""
        if self._block[0] != block:
            # No candidate's own stream: the third number must not be 0, with which a seed is padded.
            rng = np.random.default_rng([self._seed, block, self._plan.shared])
            self._block = block, self._space.sample_cells(rng, self._plan.drawn)
        return list(self._block[1])


@dataclass(frozen=True)
class _Lesson:
    """Training data from one branch: `best` are indices of passed cells, best first."""

    cells: Ints
    target: Floats
    mass: Floats
    best: Ints


def _running(trial: FrozenTrial) -> FrozenTrial:
    """As it was before it had a result."""
    seen = copy(trial)
    seen.state, seen.values, seen.datetime_complete = TrialState.RUNNING, None, None
    return seen


def _newest(told: Told, count: int) -> Told:
    return Told(told.cells[-count:], told.losses[-count:])


def _weighting(objectives: int, primary: Sequence[int] | None, rng: np.random.Generator) -> Floats:
    """Weights of a random goal: half the time all primary objectives alike, else one; the others lightly."""
    main = list(range(objectives)) if primary is None else list(primary)
    chosen = main if rng.random() < 0.5 else [main[rng.integers(len(main))]]
    weights = np.full(objectives, 0.02)
    weights[chosen] = 1.0 / len(chosen)
    return weights


def _lesson(told: Told, weights: Floats, scale: float, good: float) -> _Lesson:
    """Mark the best part of a branch's candidates; the best of them weigh twice the last of them."""
    passed = np.flatnonzero(np.isfinite(told.losses).all(axis=1))
    target, mass = np.zeros(len(told.cells)), np.full(len(told.cells), scale)
    if not len(passed):
        return _Lesson(told.cells, target, mass, passed)
    best = passed[np.argsort(ranks(told.losses[passed]) @ weights, kind="stable")]
    count = min(len(best), max(3, int(np.ceil(good * len(told.cells)))))
    target[best[:count]] = 1.0
    mass[best[:count]] *= 1.0 + (count - np.arange(count)) / count
    return _Lesson(told.cells, target, mass, best)


class LegalTPESampler(LegalSampler):
    """Optuna's multivariate TPE on a view of the branch's own trials, drawn again until legal and unseen."""

    def _choose(
        self, study: optuna.Study, trials: Sequence[FrozenTrial], seen: set[Cell], rng: np.random.Generator
    ) -> Cell:
        branch = self._focused().branch
        view = optuna.create_study(directions=study.directions, sampler=RandomSampler(seed=0))
        view.add_trials([t for t in trials if self._holds(t, branch) and t.state != TrialState.FAIL])
        tpe = TPESampler(seed=int(rng.integers(2**31)), multivariate=True, constant_liar=True)
        search_space = parameters(self._space, branch)
        number = view.ask().number
        blank = view.get_trials(deepcopy=False)[number]
        for _ in range(_TRIES_FOR_NEW):
            values = tpe.sample_relative(view, blank, search_space)
            if not values:
                break  # too few trials for a model
            cell = self._space.cell(self._space.decode({k.partition(".")[2]: v for k, v in values.items()}))
            if cell not in seen and self._space.is_legal(cell):
                return cell
        return self._random(seen, rng)


SamplerFactory = Callable[[Space, int, Sequence[int] | None], LegalSampler]
SAMPLERS: Mapping[str, SamplerFactory] = {
    "pool": LegalPoolSampler,
    "tpe": LegalTPESampler,
    "random": LegalSampler,
}
