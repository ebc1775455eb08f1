# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
"""Writes scipy.json: SciPy's results for samples with and without ties, tiny ones included.

    pip install scipy && python3 make_scipy.py > scipy.json

Ratios are Hodges-Lehmann estimates on logarithms. Their intervals contain the shifts that SciPy's
p-value does not reject at 5%; one shift between each two neighbouring candidates is tested.
"""

import json

import numpy as np
import scipy
from scipy import stats

ALPHA = 0.05
random = np.random.default_rng(20261121)


def inverted(candidates, p):
    """Returns the ends of the interval of shifts that p does not reject, among sorted candidates."""
    middles = (candidates[:-1] + candidates[1:]) / 2
    trials = np.concatenate([[candidates[0] - 1], middles, [candidates[-1] + 1]])
    kept = [k for k, trial in enumerate(trials) if p(trial) > ALPHA]
    if not kept and len(candidates) == 1:
        return [float(np.exp(candidates[0]))] * 2
    low, high = min(kept), max(kept)
    if low == 0 or high == len(trials) - 1:
        return None
    return [float(np.exp(candidates[low - 1])), float(np.exp(candidates[high]))]


def distinct(values):
    return np.unique(np.round(values, 12))


def mann_whitney(x, y):
    """Tests as SciPy does by default, but exactly for up to 49 untied values, as R does."""
    both = np.concatenate([x, y])
    exact = len(np.unique(both)) == len(both) and max(len(x), len(y)) < 50
    return stats.mannwhitneyu(x, y, method="exact" if exact else "auto")


def unpaired(x, y):
    test = mann_whitney(x, y)
    a, b = np.log(x), np.log(y)
    differences = np.sort(np.subtract.outer(b, a).ravel())
    # No trial shift fits between equal candidates.
    candidates = distinct(differences)
    candidates = differences if len(candidates) == len(differences) else candidates
    has_student = min(len(a), len(b)) > 1 and a.std() > 0
    return {
        "quartiles": [float(np.quantile(x, share)) for share in (0.25, 0.5, 0.75)],
        "u": float(test.statistic),
        "p": float(test.pvalue),
        "delta": float(np.sign(np.subtract.outer(y, x)).sum() / (len(x) * len(y))),
        "student": float(stats.ttest_ind(a, b).pvalue) if has_student else None,
        "ratio": float(np.exp(np.median(differences))),
        "interval": inverted(candidates, lambda shift: mann_whitney(a, b - shift).pvalue),
    }


def paired(x, y):
    d = np.log(y) - np.log(x)
    walsh = np.sort([(d[i] + d[j]) / 2 for i in range(len(d)) for j in range(i, len(d))])
    # SciPy's test cannot be inverted across ties of equal averages.
    whole = len(distinct(walsh)) == len(walsh)
    p = lambda shift: stats.wilcoxon(d - shift, correction=True).pvalue
    return {
        "positive": float(sum(stats.rankdata(np.abs(d[d != 0])) * (d[d != 0] > 0))),
        "p": float(p(0)),
        "ratio": float(np.exp(np.median(walsh))),
        "interval": inverted(walsh, p) if whole else None,
        "inverted": whole,
    }


def unpaired_samples():
    for n, m in [(2, 2), (2, 3), (3, 3), (3, 5), (4, 4), (4, 9), (5, 5), (6, 6), (7, 30), (8, 8),
                 (9, 9), (10, 12), (15, 15), (20, 20), (30, 25), (51, 60)]:
        centre = random.uniform(5, 5000)
        yield "untied", centre * np.exp(random.normal(0, 0.05, n)), \
            1.02 * centre * np.exp(random.normal(0, 0.05, m))
    for n, m, levels in [(2, 2, 2), (3, 3, 3), (4, 5, 4), (6, 6, 5), (8, 8, 6), (10, 10, 7),
                         (12, 20, 9), (20, 20, 12), (40, 40, 15)]:
        yield "tied", random.integers(10, 10 + levels, n).astype(float), \
            random.integers(11, 11 + levels, m).astype(float)
    yield "apart", np.arange(1.0, 6.0), np.arange(11.0, 17.0)
    yield "alike", np.full(6, 7.0), np.full(5, 7.0)
    yield "one against many", np.array([5.5]), np.arange(1.0, 40.0)


def paired_samples():
    for n in [2, 3, 5, 6, 8, 12, 20, 35, 50, 51, 80]:
        base = random.uniform(50, 500) * np.exp(random.normal(0, 0.5, n))
        yield "untied", base, base * np.exp(random.normal(0.02, 0.03, n))
    # Powers of two: equal differences stay equal as logarithms.
    for n in [4, 7, 10, 13, 14, 30]:
        base = 2.0 ** random.integers(3, 6, n)
        yield "tied", base, base * 2.0 ** random.integers(-1, 3, n)


print(f'{{"scipy": {json.dumps(scipy.__version__)},')
for name, test, samples, end in [("unpaired", unpaired, unpaired_samples, ","),
                                ("paired", paired, paired_samples, "}")]:
    cases = ({"kind": kind, "before": x.tolist(), "after": y.tolist()} | test(x, y)
             for kind, x, y in samples())
    print(f' "{name}": [\n' + ",\n".join("  " + json.dumps(case) for case in cases) + f"\n ]{end}")
