// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! HTML pages: each is one file without scripts or network access. Charts are SVG; every figure of
//! a chart is in a table too.
//!
//! Charts have the width of a phone and are placed side by side on wider screens, so their text
//! keeps its size. Colours follow the browser's light or dark setting; *before* and *after* also
//! differ in shape.
//!
//! Charts are drawn here (`svg`), not by `plotters`: its SVG has fixed colours instead of classes,
//! so one page could not support both settings, and its marks have no tooltips.

mod charts;
mod comparison_page;
pub mod page;
mod single_page;
mod svg;
mod time_charts;

pub use self::{
    charts::{BarGroup, bar_chart},
    comparison_page::{html, html_set},
    single_page::single_kernel,
};

/// Checks of pages in headless Chromium, for tests of this crate and, with the feature
/// `browser-test`, of other crates.
#[cfg(any(test, feature = "browser-test"))]
#[allow(clippy::unwrap_used, reason = "only tests call this")]
pub mod browser {
    use std::{fs, path::Path, process::Command};

    /// Returns the findings of the probe; `scheme` is 0 for dark and 1 for light.
    ///
    /// # Panics
    /// Panics if Chromium does not start.
    pub fn probe_findings(folder: &Path, page: &str, scheme: u8) -> String {
        let text = serde_json::to_string(page).unwrap().replace("</", "<\\/");
        let probe = include_str!("../../../templates/probe.html")
            .replace("const page = PAGE;", &format!("const page = {text};"));
        let path = folder.join("probe.html");
        fs::write(&path, probe).unwrap();
        let output = Command::new("timeout")
            .args(["120", "chromium", "--headless", "--no-sandbox", "--disable-gpu"])
            .arg(format!("--user-data-dir={}", folder.join("profile").display()))
            .arg(format!("--blink-settings=preferredColorScheme={scheme}"))
            .args(["--window-size=1800,1200", "--virtual-time-budget=20000", "--dump-dom"])
            .arg(format!("file://{}", path.display()))
            .output()
            .unwrap();
        let dom = String::from_utf8_lossy(&output.stdout).into_owned();
        let start = dom.find("<pre id=\"result\">").map(|at| at + "<pre id=\"result\">".len());
        let start = start.unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&output.stderr)));
        dom[start..].split("</pre>").next().unwrap().to_owned()
    }

    /// Checks a page in Chromium, dark and light, at phone and desktop width. The page must have at
    /// least `charts` charts and no defect.
    ///
    /// # Panics
    /// Panics if a chart is missing or the probe finds a defect.
    pub fn check_page(page: &str, charts: u32) {
        let folder = tempfile::tempdir().unwrap();
        for (scheme, name) in [(0, "dark=true"), (1, "dark=false")] {
            let found = probe_findings(folder.path(), page, scheme);
            println!("{found}");
            assert!(found.contains(name), "{found}");
            assert!(found.ends_with("no defect"), "{found}");
            let drawn = found.split_whitespace().next().unwrap();
            let drawn: u32 = drawn.trim_start_matches("charts=").parse().unwrap();
            assert!(drawn >= 2 * charts, "{found}");
        }
    }
}
