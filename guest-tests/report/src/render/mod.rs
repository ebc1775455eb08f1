// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Renderers of a comparison: for readers ([`text()`], [`markdown`], [`html()`], [`cover()`]) and for
//! programs ([`json`], [`csv`], [`ktap`], [`benchstat`]).
//!
//! ```text
//! number ─ columns ─┬─ text, html, export, kernel_tables
//! lines ─ sentences ─┴─ cover ─ side_table
//! ```
//!
//! `columns` declares the columns of all tables, `sentences` formats the sentences around them.

mod columns;
mod cover;
mod export;
mod html;
mod kernel_tables;
mod lines;
mod number;
mod sentences;
mod side_table;
mod text;

#[cfg(any(test, feature = "browser-test"))]
pub use self::html::browser;
pub use self::{
    cover::cover,
    export::{benchstat, csv, csv_set, json, json_set, ktap},
    html::{BarGroup, bar_chart, html, html_set, page, single_kernel},
    kernel_tables::{kernel_table, phase_table},
    number::group_digits,
    text::{markdown, text},
};
