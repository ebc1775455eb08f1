// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Everything here against SciPy's output, to six digits.

use serde::Deserialize;

use super::{shift::Estimate, *};

#[derive(Deserialize)]
struct Golden {
    unpaired: Vec<Case>,
    paired: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    kind: String,
    before: Vec<f64>,
    after: Vec<f64>,
    quartiles: Option<[f64; 3]>,
    u: Option<f64>,
    positive: Option<f64>,
    p: f64,
    delta: Option<f64>,
    student: Option<f64>,
    ratio: f64,
    interval: Option<(f64, f64)>,
    /// False where SciPy's intervals are not to be had.
    inverted: Option<bool>,
}

impl Case {
    fn name(&self) -> String {
        format!("{} {} {}", self.kind, self.before.len(), self.after.len())
    }

    #[track_caller]
    fn agrees(&self, what: &str, found: f64, wanted: f64) {
        let close = (found - wanted).abs() <= 1e-6 * wanted.abs().max(1e-9);
        assert!(
            close,
            "{}: {what} is {found}, SciPy has {wanted}",
            self.name()
        );
    }

    #[track_caller]
    fn estimate_agrees(&self, found: Estimate) {
        self.agrees("ratio", found.ratio, self.ratio);
        if self.inverted == Some(false) {
            return;
        }
        let name = self.name();
        assert_eq!(found.interval.is_some(), self.interval.is_some(), "{name}");
        if let (Some(found), Some(wanted)) = (found.interval, self.interval) {
            self.agrees("lower end", found.0, wanted.0);
            self.agrees("upper end", found.1, wanted.1);
        }
    }
}

fn golden() -> Golden {
    serde_json::from_str(include_str!("../../golden/scipy.json")).unwrap()
}

#[test]
fn two_samples_are_as_scipy_has_them() {
    let cases = golden().unpaired;
    assert!(cases.len() >= 20);
    for case in cases {
        let test = mann_whitney(&case.before, &case.after).unwrap();
        case.agrees("U", test.u, case.u.unwrap());
        case.agrees("p", test.p, case.p);
        case.agrees("delta", test.delta, case.delta.unwrap());
        let logs = |values: &[f64]| values.iter().map(|value| value.ln()).collect::<Vec<_>>();
        if let Some(p) = case.student {
            let test = student(&logs(&case.before), &logs(&case.after)).unwrap();
            case.agrees("p of Student's test", test.p, p);
        }
        case.estimate_agrees(shift(&case.before, &case.after).unwrap());
        let mut sorted = case.before.clone();
        sorted.sort_by(f64::total_cmp);
        for (share, wanted) in [0.25, 0.5, 0.75].into_iter().zip(case.quartiles.unwrap()) {
            case.agrees("quantile", quantile(&sorted, share).unwrap(), wanted);
        }
    }
}

#[test]
fn pairs_are_as_scipy_has_them() {
    let cases = golden().paired;
    assert!(cases.len() >= 15);
    for case in cases {
        let differences: Vec<f64> = case
            .before
            .iter()
            .zip(&case.after)
            .map(|(before, after)| after.ln() - before.ln())
            .collect();
        let test = wilcoxon(&differences).unwrap();
        case.agrees("positive ranks", test.positive, case.positive.unwrap());
        case.agrees("p", test.p, case.p);
        case.estimate_agrees(paired_shift(&case.before, &case.after).unwrap());
    }
}
