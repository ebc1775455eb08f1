// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! KTAP, version 1, as the kernel's test runners read it: a test for each judged step. Worse is
//! `not ok`; where nothing can be told, the test is skipped.

use std::fmt::Write;

use super::figures;
use crate::{Comparison, PhaseChange, Verdict};

/// The comparison as KTAP.
pub fn ktap(comparison: &Comparison) -> String {
    let judged: Vec<_> = comparison
        .rows()
        .filter_map(|(configuration, phase)| Some((configuration, phase, phase.verdict?)))
        .collect();
    let mut out = format!("KTAP version 1\n1..{}\n", judged.len());
    for (number, (configuration, phase, verdict)) in (1..).zip(&judged) {
        let name = format!(
            "{} {}",
            super::short_title(comparison, configuration),
            phase.phase
        );
        // A name ends where a directive begins.
        let name = name.replace('#', "").replace(", ", " ");
        let told = told(comparison, phase);
        // Writing into a String cannot fail.
        let _ = match verdict {
            Verdict::Worse => writeln!(out, "# {name}: {told}\nnot ok {number} {name}"),
            Verdict::CannotTell => writeln!(out, "ok {number} {name} # SKIP cannot tell: {told}"),
            Verdict::Better | Verdict::NotWorse => {
                writeln!(out, "# {name}: {told}\nok {number} {name}")
            }
        };
    }
    let count = |verdict| comparison.count(verdict);
    let _ = writeln!(
        out,
        "# Totals: pass:{} fail:{} xfail:0 xpass:0 skip:{} error:0",
        count(Verdict::Better) + count(Verdict::NotWorse),
        count(Verdict::Worse),
        count(Verdict::CannotTell)
    );
    out
}

fn told(comparison: &Comparison, phase: &PhaseChange) -> String {
    let metric = &comparison.metric;
    let change = phase.count(metric).unwrap_or(&phase.time);
    let mut told = format!("{metric} ratio {}", figures::ratio(change));
    if let Some(tested) = phase.tested {
        if let Some(estimate) = super::estimate(&tested) {
            told += &format!(", Hodges-Lehmann {estimate}");
        }
        told += &format!(", p after Holm {}", figures::p_value(tested.p_holm));
    }
    told
}
