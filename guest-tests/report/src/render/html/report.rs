// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The page of a report, which comparisons and single kernels share.

use askama::Template;

use super::page;
use crate::side::Side;

/// Colours of before and after.
pub const KEY: &str = "<ul class=\"key\"><li><i class=\"before\"></i>before</li>\
    <li><i class=\"after\"></i>after</li></ul>\n";

/// Data of a page.
#[derive(Debug, Template)]
#[template(path = "report.html")]
pub struct Report<'a> {
    pub title: String,
    /// Class of the verdict: the name of one, or empty.
    pub class: &'a str,
    pub verdict: Vec<String>,
    /// Table below the verdict, as HTML.
    pub overview: String,
    pub notes: Vec<String>,
    /// Sections that have charts.
    pub sections: Vec<Section>,
    /// True if tables have tests and verdicts.
    pub judged: bool,
    pub configurations: Vec<Figures>,
    /// Table of [`provenance`].
    pub provenance: String,
    pub command: Option<&'a str>,
}

/// Charts below a heading.
#[derive(Debug)]
pub struct Section {
    heading: String,
    /// Key of the colours, as HTML.
    key: String,
    /// Charts of each group, as HTML.
    groups: Vec<String>,
}

/// Tables of one configuration, as HTML.
#[derive(Debug)]
pub struct Figures {
    pub title: String,
    pub figures: String,
    pub counts: Option<String>,
}

impl Section {
    /// Returns a section; `None` without a chart.
    pub fn of(heading: &str, key: &str, groups: &[Vec<String>]) -> Option<Self> {
        let has_charts = groups.iter().any(|charts| !charts.is_empty());
        has_charts.then(|| Self {
            heading: heading.to_owned(),
            key: key.to_owned(),
            groups: groups.iter().map(|charts| charts.concat()).collect(),
        })
    }

    /// Groups whose charts differ in height need columns in place of a grid.
    fn class(&self) -> &'static str {
        if self.groups.len() > 1 { "charts uneven" } else { "charts" }
    }
}

/// Returns the kernel and host of each side.
pub fn provenance(sides: &[(&str, &Side)]) -> String {
    type Fact = (&'static str, fn(&Side) -> Option<String>);
    const FACTS: [Fact; 8] = [
        ("input", |side| Some(side.label.clone())),
        ("kernel", |side| Some(side.kernel.clone())),
        ("series", |side| side.series_line()),
        ("image, SHA-256", |side| side.image_sha256.clone()),
        ("CPU", |side| side.cpu.clone()),
        ("CPU features", |side| Some(side.features.clone())),
        ("base page", |side| side.page_size.map(|size| size.to_string())),
        ("emulator", |side| side.emulator.clone()),
    ];
    let names: Vec<&str> = sides.iter().map(|(name, _)| *name).collect();
    let of = |fact: fn(&Side) -> Option<String>| sides.iter().map(|(_, side)| fact(side)).collect();
    let rows = FACTS.map(|(name, fact)| (name, of(fact)));
    page::facts(&names, &rows)
}
