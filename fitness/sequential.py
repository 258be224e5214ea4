"""When enough has been measured: the tests behind promotion, racing and published intervals. Pure; no clock.

What makes them valid is the order of calls, not a model of the noise. A *block* times challenger A and
incumbent B in `BLOCK_PAIRS` pairs, every two of them as ABBA or as BAAB by a coin of their own (`quad`), and
compares the fastest call of each. If the two kernels were the same, the times would be what they are
whichever way the coins fell, so that the block's log-ratio is positive or negative with equal probability
given its magnitude and everything before: whatever the noise, its tails, its drift and its autocorrelation
are (Fisher, The Design of Experiments, 1935). A kernel that is really slower only makes a positive sign
rarer. So the tests below look at signs; what they assume is

    P(log-ratio > margin | past)  <=  P(log-ratio < margin | past)                                      (H0)

Without the coin (say in alternating order) H0 needs noise that is symmetric, or of median zero, given the
past, which drift breaks.

`PairedTest` is an e-process: wealth of a gambler who bets a fixed part of it on "the challenger wins this
block". Under H0 it is a non-negative supermartingale that starts at 1, so that it ever reaches 1/alpha with
probability at most alpha, at whatever time one looks, stops or goes on (Ville 1939; Ramdas, Grünwald, Vovk
and Shafer, Game-theoretic statistics and safe anytime-valid inference, 2023). Parts bet are below one, and
wealth is split over several of them (Waudby-Smith and Ramdas, Estimating means of bounded random variables by
betting, 2024), so that a lost block costs evidence and never all of it, and nothing is set from the data.
"""

import math
from bisect import insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALPHA = 0.05
"""Probability that a study ever promotes a challenger that is no faster."""

BETS = (0.6, 0.9)
"""Parts of the wealth that are bet; the wealth starts in equal shares. Nine tenths for gains of several times
the noise (ten straight wins give 308), six tenths for gains of about the noise."""

MOST_BLOCKS = 32
"""A promotion test ends here. At level 0.025 it finds a challenger that wins 80 % of blocks with probability
0.8, at 0.0017 (the fifth test of a study) one that wins 87 %."""

LEAST_EVIDENCE = 0.05
"""A promotion test is given up below this: an equal challenger costs 10 blocks on average instead of 16."""

BLOCK_PAIRS = 4
"""Pairs of calls in a block. The fastest call of each kernel stands for it, since noise of a call mostly
lengthens it (Chen and Revels, Robust benchmarking in noisy environments, 2016): with a kernel against itself
on two busy cores, of ten blocks of four pairs seven were within 1.9 % of 1, with means in place of minima
within 4.7 %, and with two pairs within 5.7 and 7.3 %."""

QUAD = ((True, False, False, True), (False, True, True, False))


def quad(rng: np.random.Generator) -> tuple[bool, bool, bool, bool]:
    """Order of the four calls of two pairs, True for the challenger: ABBA or BAAB by a fair coin."""
    return QUAD[int(rng.integers(2))]


def evidence(wins: Any, losses: Any) -> NDArray[np.float64]:
    """Wealth after so many blocks won and lost, arrays of one shape; ties count as neither.

    The expectation of the next value given the past is at most the present one under H0.
    """
    won, lost = (np.asarray(n, dtype=np.float64)[..., None] for n in (wins, losses))
    bets = np.array(BETS)
    return np.asarray(np.exp(won * np.log1p(bets) + lost * np.log1p(-bets)).mean(axis=-1))


@dataclass
class PairedTest:
    """Anytime-valid test of H0, that the challenger is not faster than the incumbent by more than a margin.

    Attributes:
        alpha: bound on the probability that `rejected` ever becomes true under H0.
        margin: log-ratio that a block must exceed to be won.
        most_blocks: the test is `over` after so many.
    """

    alpha: float
    margin: float = 0.0
    most_blocks: int = MOST_BLOCKS
    wins: int = 0
    losses: int = 0
    blocks: int = 0
    rejected: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha is a probability, not {self.alpha}")

    def update(self, log_ratio: float) -> None:
        """Take a block: log of incumbent's time over challenger's. A block without a time is no block."""
        if not math.isfinite(log_ratio):
            raise ValueError(f"a log-ratio is a finite number, not {log_ratio}")
        self.blocks += 1
        self.wins += log_ratio > self.margin
        self.losses += log_ratio < self.margin
        self.rejected = self.rejected or self.evidence >= 1 / self.alpha

    @property
    def evidence(self) -> float:
        """The e-value now; 1 at the start."""
        return float(evidence(self.wins, self.losses))

    @property
    def hopeless(self) -> bool:
        """H0 will not be rejected: evidence is too little, or would be if all blocks left were won.

        Giving up cannot make a false rejection likelier.
        """
        best = float(evidence(self.wins + self.most_blocks - self.blocks, self.losses))
        return not self.rejected and (self.evidence < LEAST_EVIDENCE or best < 1 / self.alpha)

    @property
    def over(self) -> bool:
        """Nothing is left to measure."""
        return self.rejected or self.hopeless or self.blocks >= self.most_blocks


def power(win: float, alpha: float, most_blocks: int = MOST_BLOCKS) -> float:
    """Probability that a challenger which wins each block with probability `win` is found. Exact."""
    found, reached = 0.0, {(0, 0): 1.0}
    for _ in range(most_blocks):
        going: dict[tuple[int, int], float] = {}
        for (wins, losses), mass in reached.items():
            for won, chance in ((True, win), (False, 1 - win)):
                test = PairedTest(
                    alpha, most_blocks=most_blocks, wins=wins, losses=losses, blocks=wins + losses
                )
                test.update(1.0 if won else -1.0)
                if test.rejected:
                    found += mass * chance
                elif not test.over:
                    at = test.wins, test.losses
                    going[at] = going.get(at, 0.0) + mass * chance
        reached = going
    return found


def wins_needed(alpha: float, wanted: float = 0.8, most_blocks: int = MOST_BLOCKS) -> float:
    """Least probability of winning a block with which a challenger is found with power `wanted`."""
    low, high = 0.5, 1.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle, alpha, most_blocks) >= wanted else (middle, high)
    return high


def spending(alpha: float, k: int) -> float:
    """A share alpha / (k (k + 1)) for the k-th test (1, 2, …); all of them together sum to alpha."""
    if k < 1:
        raise ValueError(f"tests are counted from 1, not from {k}")
    return alpha / (k * (k + 1))


def level(alpha: float, rejections: Sequence[bool]) -> float:
    """Level of the next test of a study, given how each test before it ended, oldest first.

    A test has its share of `spending`, and the level of the test before it when that one rejected. Which
    hypothesis is tested next may depend on everything before. The probability that any true H0 is ever
    rejected is at most alpha: up to the first such rejection only false hypotheses passed their level on, so
    that the levels of the true ones are disjoint parts of the shares, and each is spent under a bound that
    holds given the past (the fallback procedure: Wiens 2003; online: Tian and Ramdas, Online control of the
    familywise error rate, 2021).
    """
    inherited = 0.0
    for k, rejected in enumerate(rejections, start=1):
        inherited = spending(alpha, k) + inherited if rejected else 0.0
    return spending(alpha, len(rejections) + 1) + inherited


@dataclass(frozen=True)
class Estimate:
    """The middle of some log-ratios as a factor, with an interval.

    Attributes:
        coverage: probability that such an interval holds the true factor.
    """

    low: float
    median: float
    high: float
    coverage: float


def estimate(log_ratios: Sequence[float], confidence: float = 0.95) -> Estimate:
    """Median and its `order_interval`, as factors, from blocks that chose nothing. ValueError without any."""
    if not log_ratios:
        raise ValueError("an estimate needs a block")
    low, high, coverage = order_interval(len(log_ratios), confidence)
    ordered = sorted(log_ratios)
    return Estimate(math.exp(ordered[low]), math.exp(median(ordered)), math.exp(ordered[high]), coverage)


def order_interval(n: int, confidence: float) -> tuple[int, int, float]:
    """Indices into n sorted log-ratios between which their true middle lies, and how surely.

    If the challenger takes the incumbent's time over a constant, each log-ratio lies above that constant's
    log or below it by the block's coin, so that the coverage 1 - 2 P(Binomial(n, 1/2) < k) of
    [x_(k), x_(n-k+1)] is exact for any noise (at least that with ties). The narrowest such interval with the
    wanted coverage; fewer than six blocks cannot reach 95 %, their extremes have the coverage that is given.
    """
    k, coverage = 1, 1 - 2 * 0.5**n
    while 2 * (k + 1) <= n and (wider := 1 - 2 * _binomial_cdf(k, n)) >= confidence:
        k, coverage = k + 1, wider
    return k - 1, n - k, coverage


def _binomial_cdf(k: int, n: int) -> float:
    """P(Binomial(n, 1/2) <= k)."""
    return sum(math.comb(n, i) for i in range(k + 1)) * 0.5**n


RACE_TAILS = (1 / 2, 1 / 4, 1 / 16)
"""Bets of a race: that a sample lies so far below the bar as only this share of the noise reaches."""

_RACE_BET = 0.9
_FEWEST_BEYOND = 8
_RESIDUALS = 16  # of one kernel


class NoiseLaw:
    """How far a pair of timed calls strays from its kernel's true log speed-up, from pairs seen so far.

    One for each workload of a study. Keeps the last `size` residuals, each from the median of its kernel's
    other pairs, which widens them a little: the safe side.
    """

    def __init__(self, size: int = 1024) -> None:
        self._recent: deque[float] = deque(maxlen=size)
        self._ordered: list[float] = []

    def learn(self, log_speedups: Sequence[float]) -> None:
        """Take the pairs of one kernel; fewer than three say nothing of it. Of many it takes some, evenly
        spread, lest the law be that of the few kernels that were timed the longest."""
        if len(log_speedups) < 3:
            return
        for i in range(0, len(log_speedups), math.ceil(len(log_speedups) / _RESIDUALS)):
            others = [*log_speedups[:i], *log_speedups[i + 1 :]]
            self._remember(abs(log_speedups[i] - median(others)))

    def reach(self, tail: float) -> float | None:
        """What noise goes beyond to one side with probability at most `tail`; None while too few were seen.

        With n residuals of exchangeable pairs the k-th largest magnitude is exceeded with probability
        k/(n+1) (Vovk, Gammerman and Shafer, Algorithmic Learning in a Random World, 2005), to one side with
        half of that. k is taken as if it were not half: one set of residuals serves many bets, so that its
        own luck must not count. With k >= 8 the true share exceeds the stated one for one set in fifty.
        """
        if tail >= 0.5:
            return 0.0
        rank = int(tail * (len(self._ordered) + 1))
        return self._ordered[-rank] if rank >= _FEWEST_BEYOND else None

    def _remember(self, residual: float) -> None:
        if len(self._recent) == self._recent.maxlen:
            self._ordered.remove(self._recent[0])
        self._recent.append(residual)
        insort(self._ordered, residual)


@dataclass
class Race:
    """Says, sample by sample, whether a candidate can still come near the bar on one workload.

    Tests H0: true log speed-up >= log(bar) + log(1 - margin), by bets that a sample falls short of that by 0
    (won by half of the noise) and by two reaches of the noise law (by a quarter and a sixteenth of it). As
    with `PairedTest`, a candidate of H0 is ever called hopeless with probability at most `delta`, however
    often one looks. It assumes noise that is symmetric given the past and, for the two far bets, has the
    tails of the pairs seen so far; without a law only the first bet stands, and nothing stops before the
    fifth sample at 5 %. Races against a bound go back to Maron and Moore (Hoeffding races, 1994) and
    Birattari et al. (F-race, 2002); their bounds hold for a fixed number of looks or a fixed law of noise.

    What is raced is the speed in this process. Its place in memory (see `timing`) is in all its samples and
    in no law, so that the margin must hold it too. Of simulated kernels with places that differ by 2 %, 1 %
    were stopped when as fast as the bar, 21 % at the edge of the margin (`experiments/bench_statistics.py`).

    Attributes:
        bar: speed-up to come near, as a factor.
        delta: bound on the probability of stopping a candidate that is within the margin.
        margin: part of the bar that a candidate may fall short of.
        least: samples before which nothing is hopeless, so that what is kept is never a single call's time.
    """

    bar: float
    noise: NoiseLaw = field(default_factory=NoiseLaw)
    delta: float = 0.05
    margin: float = 0.05
    least: int = 2
    samples: int = 0
    hopeless: bool = False

    def __post_init__(self) -> None:
        reaches = [(tail, self.noise.reach(tail)) for tail in RACE_TAILS]
        self._bets = [(tail, reach) for tail, reach in reaches if reach is not None]
        self._wealth = [1 / len(self._bets)] * len(self._bets)
        self._line = math.log(self.bar) + math.log1p(-self.margin)

    def update(self, log_speedup: float) -> None:
        """Take a pair of calls: log of the baseline's time over the candidate's."""
        self.samples += 1
        for i, (tail, reach) in enumerate(self._bets):
            won = log_speedup < self._line - reach
            self._wealth[i] *= 1 - _RACE_BET + (_RACE_BET / tail if won else 0.0)
        enough = self.samples >= self.least and self.evidence >= 1 / self.delta
        self.hopeless = self.hopeless or enough

    @property
    def evidence(self) -> float:
        """The e-value against H0 now; 1 at the start."""
        return sum(self._wealth)
