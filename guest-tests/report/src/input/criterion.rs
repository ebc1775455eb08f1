// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! What criterion leaves behind of each benchmark.
//!
//! ```text
//! target/criterion/GROUP/FUNCTION/new/benchmark.json   its name: full_id
//!                                     sample.json      turns of the loop and the time they took
//!                                     estimates.json   what criterion makes of them
//! ```
//!
//! Every sample is a run here: its time through its turns. Where only the estimates were kept, their
//! median is a single run. `new` is what ran last; `cargo bench -- --save-baseline NAME` leaves a
//! folder `NAME` beside it.

use serde::Deserialize;
use thiserror::Error;

use crate::sample::{Sample, Setup, Step, printable};
use granule_types::record::Host;

/// What samples carry as their engine.
pub const ENGINE: &str = "criterion";
/// The folder of what ran last.
pub const LAST: &str = "new";
/// The files in it.
pub const FILES: [&str; 3] = ["benchmark.json", "sample.json", "estimates.json"];

const STEP: Step = Step::foreign(40, "time");

/// Why criterion's files are of no use.
#[derive(Debug, Error)]
pub enum CriterionError {
    /// A file is not as criterion writes it.
    #[error("not what criterion writes, or cut off: run `cargo bench` again")]
    Parse(#[source] serde_json::Error),
    /// A sample makes no sense.
    #[error("line 1: sample {at} is no time of a loop: run `cargo bench` again")]
    Sample {
        /// Which, from 1.
        at: usize,
    },
}

/// The name of a benchmark from its `benchmark.json`.
///
/// # Errors
/// The text is not what criterion writes.
pub fn name(text: &str) -> Result<String, CriterionError> {
    #[derive(Deserialize)]
    struct Benchmark {
        full_id: String,
    }
    let benchmark: Benchmark = serde_json::from_str(text).map_err(CriterionError::Parse)?;
    Ok(benchmark.full_id)
}

/// The runs in a `sample.json`.
///
/// # Errors
/// The text is not what criterion writes.
pub fn runs(text: &str) -> Result<Vec<f64>, CriterionError> {
    #[derive(Deserialize)]
    struct Samples {
        iters: Vec<f64>,
        times: Vec<f64>,
    }
    let samples: Samples = serde_json::from_str(text).map_err(CriterionError::Parse)?;
    let count = samples.iters.len().max(samples.times.len()).max(1);
    let run = |at: usize| {
        let (turns, time) = (samples.iters.get(at)?, samples.times.get(at)?);
        let each = time / turns;
        (each.is_finite() && each > 0.0 && *turns >= 1.0).then_some(each)
    };
    let each = |at| run(at).ok_or(CriterionError::Sample { at: at + 1 });
    (0..count).map(each).collect()
}

/// The median in an `estimates.json`.
///
/// # Errors
/// The text is not what criterion writes.
pub fn median(text: &str) -> Result<f64, CriterionError> {
    #[derive(Deserialize)]
    struct Estimates {
        median: Estimate,
    }
    #[derive(Deserialize)]
    struct Estimate {
        point_estimate: f64,
    }
    let estimates: Estimates = serde_json::from_str(text).map_err(CriterionError::Parse)?;
    let median = estimates.median.point_estimate;
    if median.is_finite() && median > 0.0 {
        Ok(median)
    } else {
        Err(CriterionError::Sample { at: 1 })
    }
}

/// Runs of a benchmark as samples.
pub fn samples(name: &str, runs: &[f64]) -> Vec<Sample> {
    let sample = |(iteration, &ns): (u32, &f64)| Sample {
        host: Host::default(),
        engine: ENGINE.to_owned(),
        setup: Setup {
            subject: printable(name),
            ..Setup::default()
        },
        seed: 0,
        iteration,
        obtained: None,
        step: STEP,
        ns,
        vcpu_ns: Vec::new(),
        counters: Default::default(),
        events: Default::default(),
        gauges: Default::default(),
    };
    (0..).zip(runs).map(sample).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_is_the_time_of_a_turn() {
        let text = r#"{"sampling_mode":"Linear","iters":[10.0,20.0],"times":[15.0,31.0]}"#;
        assert_eq!(runs(text).unwrap(), [1.5, 1.55]);
    }

    #[test]
    fn damage_is_an_error() {
        for text in [
            "",
            "{}",
            r#"{"iters":[1.0],"times":[]}"#,
            r#"{"iters":[0.0],"times":[1.0]}"#,
            r#"{"iters":[],"times":[]}"#,
        ] {
            assert!(runs(text).is_err(), "{text}");
        }
        assert!(median(r#"{"median":{"point_estimate":-1}}"#).is_err());
        assert!(name("{}").is_err());
    }
}
