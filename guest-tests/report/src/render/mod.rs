// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Renderers of a comparison: for readers ([`text()`], [`markdown`], [`html()`]) and for programs
//! ([`json`], [`csv`], [`ktap`], [`benchstat`]).
//!
//! ```text
//! number ─ columns ─┬─ text, html, export
//!            words ─┘
//! ```
//!
//! `columns` declares the columns of all tables, `words` formats the sentences around them.

mod columns;
mod export;
mod html;
mod number;
mod text;
mod words;

#[cfg(any(test, feature = "browser-test"))]
pub use self::html::browser;
pub use self::{
    export::{benchstat, csv, json, ktap},
    html::{Lane, bars, html, page, single},
    text::{markdown, text},
};
