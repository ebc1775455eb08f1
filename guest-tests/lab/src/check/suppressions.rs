// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Findings that a user accepts, each with a reason.
//!
//! ```text
//! # RULE FUNCTION[,FUNCTION…] # REASON
//! returned-unclean stage2_map_walk_leaf # known in 5.10, fixed by the series
//! ```
//!
//! A line applies to findings of the rule whose call chain contains the functions in this order,
//! from the innermost on.

use std::path::Path;

use granule_stage2::check::Rule;

use super::defect::Defect;
use crate::{error::LabError, shell};

/// A line of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suppression {
    pub line: usize,
    rule: String,
    functions: Vec<String>,
    pub reason: String,
}

impl Suppression {
    /// Reports whether this line applies to a finding.
    pub fn applies_to(&self, defect: &Defect) -> bool {
        let chain = defect.functions();
        let mut chain = chain.iter();
        self.rule == defect.rule
            && self.functions.iter().all(|name| chain.any(|function| function == name))
    }

    /// Returns rule and functions.
    pub fn name(&self) -> String {
        format!("{} {}", self.rule, self.functions.join(","))
    }
}

/// Reads a file.
///
/// # Errors
/// The file cannot be read, or a line names no rule, no function or no reason.
pub fn read(path: &Path) -> Result<Vec<Suppression>, LabError> {
    let text = shell::read(path)?;
    parse(&String::from_utf8_lossy(&text)).map_err(|(line, reason)| {
        LabError::Unusable(format!("--suppress {}, line {line}: {reason}", path.display()))
    })
}

fn parse(text: &str) -> Result<Vec<Suppression>, (usize, String)> {
    let lines = (1..).zip(text.lines().map(str::trim));
    lines
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(number, line)| suppression(number, line).map_err(|reason| (number, reason)))
        .collect()
}

fn suppression(line: usize, text: &str) -> Result<Suppression, String> {
    let (finding, reason) = text.split_once('#').map_or((text, ""), |(a, b)| (a, b.trim()));
    let words: Vec<&str> = finding.split_whitespace().collect();
    let [rule, functions] = words[..] else {
        return Err("expected 'RULE FUNCTION[,FUNCTION…] # REASON'".to_owned());
    };
    if !Rule::ALL.iter().any(|known| known.name() == rule) {
        return Err(format!("unknown rule '{rule}': docs/checking.md lists the rules"));
    }
    if reason.is_empty() {
        return Err("a reason is missing: add '# REASON'".to_owned());
    }
    let functions: Vec<_> = functions.split(',').map(str::to_owned).collect();
    if functions.iter().any(String::is_empty) {
        return Err("a function has no name".to_owned());
    }
    Ok(Suppression { line, rule: rule.to_owned(), functions, reason: reason.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::{super::defect::tests::defect, *};

    #[test]
    fn a_line_applies_to_its_rule_and_functions_in_their_order() {
        let found = defect("returned-unclean", &["leaf", "walk", "walk", "abort"]);
        for (line, expected) in [
            ("returned-unclean leaf # known", true),
            ("returned-unclean leaf,abort # known", true),
            ("returned-unclean abort,leaf # known", false),
            ("unclean-reachable leaf # known", false),
            ("returned-unclean lea # known", false),
        ] {
            let suppressions = parse(&format!("# a remark\n\n{line}\n")).unwrap();

            assert_eq!(suppressions[0].applies_to(&found), expected, "{line}");
            assert_eq!((suppressions[0].line, suppressions[0].reason.as_str()), (3, "known"));
        }
    }

    #[test]
    fn a_line_without_rule_function_or_reason_is_refused() {
        for (line, expected) in [
            ("returned-unclean leaf", "a reason is missing"),
            ("returned-unclean leaf #", "a reason is missing"),
            ("returned-unclean # x", "expected 'RULE FUNCTION"),
            ("returned-clean leaf # x", "unknown rule 'returned-clean'"),
            ("returned-unclean leaf, # x", "a function has no name"),
        ] {
            let (number, reason) = parse(line).unwrap_err();

            assert_eq!(number, 1);
            assert!(reason.contains(expected), "{line}: {reason}");
        }
    }
}
