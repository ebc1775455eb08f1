// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! KTAP, version 1, for the kernel's test runners: a test for each judged step. A regression is
//! `not ok`, an inconclusive step is skipped.

use std::fmt::Write;

use super::{columns, number, words};
use crate::{
    comparison::{Comparison, PhaseChange},
    judge::Verdict,
};

/// Renders a comparison as KTAP.
pub fn ktap(comparison: &Comparison) -> String {
    let rows = comparison.rows();
    let judged: Vec<_> = rows.filter_map(|(c, phase)| Some((c, phase, phase.verdict?))).collect();
    let mut out = format!("KTAP version 1\n1..{}\n", judged.len());
    for (number, (configuration, phase, verdict)) in (1..).zip(&judged) {
        let name = format!("{} {}", words::short_title(comparison, configuration), phase.phase);
        // A name ends where a directive begins.
        let name = name.replace('#', "").replace(", ", " ");
        let reason = reason(comparison, phase);
        // Writing into a String cannot fail.
        let _ = match verdict {
            Verdict::Regression => writeln!(out, "# {name}: {reason}\nnot ok {number} {name}"),
            Verdict::Inconclusive => {
                writeln!(out, "ok {number} {name} # SKIP inconclusive: {reason}")
            }
            Verdict::Improvement | Verdict::NoRegression => {
                writeln!(out, "# {name}: {reason}\nok {number} {name}")
            }
        };
    }
    let (failed, skipped) =
        (comparison.count(Verdict::Regression), comparison.count(Verdict::Inconclusive));
    let _ = writeln!(
        out,
        "# Totals: pass:{} fail:{failed} xfail:0 xpass:0 skip:{skipped} error:0",
        judged.len() - failed - skipped,
    );
    out
}

fn reason(comparison: &Comparison, phase: &PhaseChange) -> String {
    let metric = &comparison.metric;
    let change = phase.count(metric).unwrap_or(&phase.time);
    let mut reason = format!("{metric} ratio {}", number::ratio(change));
    if let Some(tested) = &phase.tested {
        if let Some(estimate) = columns::estimate(tested) {
            reason += &format!(", Hodges-Lehmann {estimate}");
        }
        reason += &format!(", p after Holm {}", number::p_value(tested.p_holm));
    }
    reason
}
