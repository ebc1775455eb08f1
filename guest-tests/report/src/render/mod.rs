// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Renderers: a comparison for readers ([`text()`], [`markdown()`], [`html()`]) and for programs
//! ([`json`], [`csv()`], [`ktap()`], [`benchstat()`]).
//!
//! ```text
//! number ─ columns ─┬─ text, markdown, csv, html
//!            words ─┘  ktap, benchstat
//! ```
//!
//! `columns` declares the columns of all tables, `words` the sentences around them.

mod benchstat;
mod columns;
mod csv;
mod html;
mod ktap;
mod markdown;
mod number;
mod text;
mod words;

#[cfg(any(test, feature = "browser-test"))]
pub use self::html::browser;
pub use self::{
    benchstat::benchstat,
    csv::csv,
    html::{Lane, bars, html, page, single},
    ktap::ktap,
    markdown::markdown,
    text::text,
};

/// Renders a comparison as JSON, schema [`crate::SCHEMA`], with the fields of [`crate::Comparison`].
///
/// # Errors
/// Those of the JSON writer; none is expected.
pub fn json(comparison: &crate::Comparison) -> Result<String, serde_json::Error> {
    serde_json::to_string_pretty(comparison).map(|text| text + "\n")
}
