// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Renderers of a comparison: for readers ([`text()`], [`markdown`], [`html()`]) and for programs
//! ([`json`], [`csv`], [`ktap`], [`benchstat`]).
//!
//! ```text
//! number ─ columns ─┬─ text, html, export
//!        sentences ─┘
//! ```
//!
//! `columns` declares the columns of all tables, `sentences` formats the sentences around them.

mod columns;
mod export;
mod html;
mod number;
mod sentences;
mod text;

#[cfg(any(test, feature = "browser-test"))]
pub use self::html::browser;
pub use self::{
    export::{benchstat, csv, json, ktap},
    html::{BarGroup, bar_chart, html, page, single_kernel},
    text::{markdown, text},
};
