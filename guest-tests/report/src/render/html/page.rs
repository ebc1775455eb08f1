// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Parts shared by the pages of a comparison, of one kernel, and of the lab. A template that does
//! not match its data does not compile.

use askama::{
    Template,
    filters::{Escaper, Html},
};

use crate::provenance::{Side, series_line};

const STYLE: &str = include_str!("../../../templates/style.css");
pub(super) const SIDE_KEY: &str = "<ul class=\"key\"><li><i class=\"before\"></i>before</li>\
    <li><i class=\"after\"></i>after</li></ul>\n";

/// Escapes the special characters of HTML and SVG.
pub fn escape_html(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    // Writing into a String cannot fail.
    let _ = Html.write_escaped_str(&mut out, text);
    out
}

pub(super) fn render_template(template: &impl Template) -> String {
    // Writing into a String cannot fail, and no template formats a value that can.
    template.render().unwrap_or_default()
}

/// Returns a page with a title above `body`, which is HTML.
pub fn page(title: &str, body: &str) -> String {
    #[derive(Template)]
    #[template(path = "parts.html", block = "page")]
    struct PageTemplate<'a> {
        title: &'a str,
        body: &'a str,
    }
    render_template(&PageTemplate { title, body })
}

/// Returns the paragraph of a verdict. `class` is `regression`, `improvement`, `inconclusive`, or
/// empty.
pub fn verdict(class: &str, words: &str) -> String {
    format!("<p class=\"verdict {class}\">{}</p>\n", escape_html(words))
}

/// Returns a table; its cells are HTML.
pub fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let rows: Vec<_> = rows.iter().map(|cells| ("", cells.clone())).collect();
    table_with_class(head, &rows)
}

/// Returns a table; each row has a class and cells in HTML.
pub(super) fn table_with_class(head: &[&str], rows: &[(&str, Vec<String>)]) -> String {
    #[derive(Template)]
    #[template(path = "parts.html", block = "table")]
    struct TableTemplate<'a> {
        head: &'a [&'a str],
        rows: &'a [(&'a str, Vec<String>)],
    }
    render_template(&TableTemplate { head, rows })
}

/// Returns a table of properties with a column for each subject. Equal values of all subjects share
/// one cell.
pub fn properties(columns: &[&str], rows: &[(&str, Vec<Option<String>>)]) -> String {
    /// Name of a property, number of columns that a cell spans, and the cells.
    type PropertyRow<'a> = (&'a str, usize, Vec<Option<&'a str>>);
    #[derive(Template)]
    #[template(path = "parts.html", block = "properties")]
    struct Properties<'a> {
        columns: &'a [&'a str],
        rows: Vec<PropertyRow<'a>>,
    }
    let rows = rows.iter().map(|(name, properties)| {
        let known = properties
            .iter()
            .map(|property| property.as_deref().filter(|property| !property.is_empty()));
        let mut cells: Vec<Option<&str>> = known.collect();
        let is_shared = cells.iter().all(|cell| *cell == cells[0]);
        let span = if is_shared { cells.len() } else { 1 };
        cells.truncate(properties.len() / span.max(1));
        (*name, span, cells)
    });
    let rows = rows.collect();
    render_template(&Properties { columns, rows })
}

/// Returns text that is collapsed below a summary.
pub fn details(summary: &str, text: &str) -> String {
    format!(
        "<details><summary>{}</summary>\n<pre>{}</pre></details>\n",
        escape_html(summary),
        escape_html(text)
    )
}

/// Returns the section with the command that generated the page.
pub fn command_section(command: &str) -> String {
    format!("<p>Command:</p>\n<pre>{}</pre>\n", escape_html(command))
}

/// Body of a report page, for comparisons and single kernels.
#[derive(Debug, Template)]
#[template(path = "parts.html", block = "report")]
pub(super) struct ReportBody<'a> {
    /// CSS class: the name of the verdict, or empty.
    pub class: &'a str,
    pub verdict: Vec<String>,
    /// Table below the verdict, as HTML.
    pub overview: String,
    pub notes: Vec<String>,
    pub sections: Vec<Section>,
    /// Indicates that the tables contain tests and verdicts.
    pub has_verdicts: bool,
    pub configurations: Vec<ConfigurationTables>,
    pub provenance: String,
    pub command: Option<&'a str>,
}

#[derive(Debug)]
pub(super) struct Section {
    heading: String,
    /// Colour key, as HTML.
    key: String,
    /// Charts of each group, as HTML.
    groups: Vec<String>,
}

/// Tables of one configuration, as HTML.
#[derive(Debug)]
pub(super) struct ConfigurationTables {
    pub title: String,
    pub figures: String,
    pub counts: Option<String>,
}

impl Section {
    pub fn new(heading: &str, key: &str, groups: &[Vec<String>]) -> Option<Self> {
        let has_charts = groups.iter().any(|charts| !charts.is_empty());
        has_charts.then(|| Self {
            heading: heading.to_owned(),
            key: key.to_owned(),
            groups: groups.iter().map(|charts| charts.concat()).collect(),
        })
    }

    /// Returns the CSS class. Charts of several groups differ in height and do not fit a grid.
    fn class(&self) -> &'static str {
        if self.groups.len() > 1 { "charts uneven" } else { "charts" }
    }
}

pub(super) fn provenance(sides: &[(&str, &Side)]) -> String {
    type Property = (&'static str, fn(&Side) -> Option<String>);
    const PROPERTIES: [Property; 11] = [
        ("input", |side| Some(side.label.clone())),
        ("kernel", |side| Some(side.kernel.clone())),
        ("series", |side| series_line(side.series.as_deref())),
        ("commit", |side| side.commit.clone()),
        ("compiler", |side| side.compiler.clone()),
        ("image, SHA-256", |side| side.image_sha256.clone()),
        ("CPU", |side| side.cpu.clone()),
        ("CPU features", |side| Some(side.features.clone())),
        ("base page", |side| side.page_size.map(|size| size.to_string())),
        ("emulator", |side| side.emulator.clone()),
        ("programs, SHA-256", Side::programs_line),
    ];
    let names: Vec<&str> = sides.iter().map(|(name, _)| *name).collect();
    let of = |property: fn(&Side) -> Option<String>| {
        sides.iter().map(|(_, side)| property(side)).collect()
    };
    let is_optional = |name: &str| ["commit", "compiler", "programs, SHA-256"].contains(&name);
    let rows = PROPERTIES.map(|(name, property)| (name, of(property)));
    let is_shown = |(name, cells): &(&str, Vec<Option<String>>)| {
        !is_optional(name) || cells.iter().any(Option::is_some)
    };
    let rows: Vec<_> = rows.into_iter().filter(is_shown).collect();
    properties(&names, &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_escaped_in_every_part() {
        let parts = [
            page("<a>", ""),
            verdict("", "<a>"),
            details("<a>", "<a>"),
            command_section("<a>"),
            properties(&["<a>"], &[("name", vec![Some("<a>".to_owned())])]),
            table(&["<a>"], &[]),
        ];
        for part in parts {
            assert!(part.contains("&#60;a&#62;") && !part.contains("<a>"), "{part}");
        }
    }
}
