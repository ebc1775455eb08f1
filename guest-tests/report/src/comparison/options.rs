// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Options of a comparison.

/// Default minimum effect: growth by a smaller share is no regression.
pub const MIN_EFFECT: f64 = 0.01;
/// Default minimum effect under emulation, where another schedule alone makes a difference.
pub const MIN_EFFECT_EMULATED: f64 = 0.03;

/// Options of a comparison.
#[derive(Debug, Clone)]
pub struct Options {
    /// Names of the two sides: files, directories or series.
    pub labels: [String; 2],
    /// True if sides of different provenance are compared.
    pub force: bool,
    /// Growth that makes a regression, as a share of before (0.03 is 3%); `None` for
    /// 1%, and 3% under emulation.
    pub min_effect: Option<f64>,
    /// Count to judge instead of the time.
    pub metric: Option<String>,
    /// Steps to compare; all if empty.
    pub phases: Vec<String>,
    /// True if the first run before belongs to the first run after.
    pub paired: bool,
    /// Command line that repeats the comparison, for reports.
    pub command: Option<String>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            labels: ["before".to_owned(), "after".to_owned()],
            force: false,
            min_effect: None,
            metric: None,
            phases: Vec::new(),
            paired: false,
            command: None,
        }
    }
}

/// Returns the command line of this process, quoted for a shell, for reports.
pub fn command_line() -> String {
    let words = std::env::args_os().enumerate().map(|(at, word)| {
        let word = word.to_string_lossy().into_owned();
        let word = match word.rsplit_once('/') {
            Some((_, name)) if at == 0 => name.to_owned(),
            _ => word,
        };
        shlex::try_quote(&word).map_or_else(|_| word.clone(), |quoted| quoted.into_owned())
    });
    words.collect::<Vec<_>>().join(" ")
}
