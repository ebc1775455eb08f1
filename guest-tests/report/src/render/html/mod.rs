// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! HTML pages: one file without scripts or network access. Charts are SVG; every figure of a chart
//! is in a table too.
//!
//! Charts are no wider than a phone and lie side by side where there is room, so their text keeps
//! its size. Colours follow the light or dark setting of the reader; before and after also differ
//! in shape.
//!
//! Charts are drawn here (`svg`), not by `plotters`: its SVG has fixed colours in place of classes,
//! so one page could not serve both settings, and marks without tooltips.

mod bars;
#[cfg(any(test, feature = "browser-test"))]
pub mod browser;
mod comparison_page;
mod counts;
pub mod page;
mod report;
mod scale;
mod single_page;
mod svg;
mod times;
mod vcpus;

#[cfg(test)]
mod tests;

pub use self::{
    bars::{Lane, bars},
    comparison_page::html,
    single_page::single,
};
