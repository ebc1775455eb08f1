// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A page: one file that needs nothing else, no script and no network. Charts are drawings in it;
//! every figure of a chart stands in a table too.
//!
//! Charts are no wider than a phone and are laid side by side where there is room, so that their
//! text never shrinks. Colours follow the reader's light or dark setting; before and after differ
//! in shape as well.

mod bars;
mod counts;
mod phases;
mod scale;
mod single;
mod svg;
mod tables;
mod vcpus;

#[cfg(test)]
pub(crate) mod tests;

use std::fmt::Write;

use self::svg::escaped;
pub use self::{
    bars::{Lane, bars},
    single::single,
};
use super::page;
use crate::{Comparison, Verdict, comparison::Growing};

const KEY: &str = "<ul class=\"key\"><li><i class=\"before\"></i>before</li>\
    <li><i class=\"after\"></i>after</li></ul>\n";

/// The comparison as a page.
pub fn html(comparison: &Comparison) -> String {
    let name = format!(
        "{} against {}",
        comparison.after.label, comparison.before.label
    );
    let mut out = String::new();
    summary(&mut out, comparison);
    times(&mut out, comparison);
    counted(&mut out, comparison);
    let steps = super::phases(comparison);
    let charts = steps
        .iter()
        .filter_map(|step| vcpus::distribution(comparison, step));
    section(&mut out, "Time of each vCPU", KEY, &[charts.collect()]);
    out.push_str("<h2>Every figure</h2>\n");
    out.push_str(
        "<p class=\"soft\">Medians, beside them quartiles (least and greatest of fewer than four \
         runs). The interval and delta are Hodges-Lehmann's on logarithms and Cliff's; p is \
         corrected over the table by Holm's method.</p>\n",
    );
    for configuration in &comparison.configurations {
        out.push_str(&tables::figures_of(comparison, configuration));
    }
    out.push_str("<h2>Where it comes from</h2>\n");
    out.push_str(&tables::provenance(&[
        ("before", &comparison.before),
        ("after", &comparison.after),
    ]));
    if let Some(command) = &comparison.command {
        out.push_str(&page::made_by(command));
    }
    page::page(&name, &out)
}

/// What was found, and what a reader must know.
fn summary(out: &mut String, comparison: &Comparison) {
    let class = if comparison.count(Verdict::Worse) > 0 {
        Verdict::Worse.name()
    } else if comparison.count(Verdict::CannotTell) > 0 {
        Verdict::CannotTell.name()
    } else {
        ""
    };
    for line in super::verdict(comparison) {
        out.push_str(&page::verdict(class, &line));
    }
    out.push_str(&tables::overview(comparison));
    out.push_str("<ul>\n");
    let together = comparison.geomeans.iter().map(super::together);
    let head = super::head(comparison).into_iter();
    let time = head.filter(|(name, _)| *name == "time" || *name == "guest");
    let told = time.map(|(name, words)| format!("{name}: {words}"));
    for line in together.chain(super::notes(comparison)).chain(told) {
        // Writing into a String cannot fail.
        let _ = writeln!(out, "<li>{}</li>", escaped(&line));
    }
    out.push_str("</ul>\n");
}

/// The charts of times, phase by phase.
fn times(out: &mut String, comparison: &Comparison) {
    let mut groups = Vec::new();
    for step in super::phases(comparison) {
        let mut charts = vec![phases::by_configuration(comparison, step)];
        for growing in Growing::ALL {
            charts.extend(phases::by_growth(comparison, step, growing));
        }
        groups.push(charts);
    }
    // Single charts of phases lie side by side; with growth, each phase has rows of its own.
    if groups.iter().all(|charts| charts.len() == 1) {
        groups = vec![groups.concat()];
    }
    section(out, "Time of each phase", KEY, &groups);
}

/// The charts of counts, configuration by configuration.
fn counted(out: &mut String, comparison: &Comparison) {
    let configurations = comparison.configurations.iter();
    let charts = configurations.filter_map(|one| counts::breakdown(comparison, one));
    section(out, "Counts", &counts::key(comparison), &[charts.collect()]);
}

/// Groups of charts under a heading; nothing where there is no chart.
fn section(out: &mut String, heading: &str, key: &str, groups: &[Vec<String>]) {
    if groups.iter().all(Vec::is_empty) {
        return;
    }
    let _ = write!(out, "<h2>{heading}</h2>\n{key}");
    let class = if groups.len() > 1 {
        "charts uneven"
    } else {
        "charts"
    };
    for charts in groups {
        let _ = writeln!(out, "<div class=\"{class}\">\n{}</div>", charts.concat());
    }
}
