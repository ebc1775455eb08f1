// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The report as SARIF 2.1.0 (Static Analysis Results Interchange Format, OASIS), which code review
//! tools read.

use granule_stage2::check::Rule;
use serde_json::{Value, json};

use super::{
    defect::Frame,
    report::{Report, ReportedFinding},
};

impl Report {
    /// Formats the report as SARIF.
    pub fn sarif(&self) -> String {
        let rule = |rule: &Rule| {
            json!({
                "id": rule.name(),
                "shortDescription": { "text": rule.description() },
                "help": { "text": rule.source() },
            })
        };
        let used = |rule: &&Rule| self.findings.iter().any(|one| one.defect.rule == rule.name());
        let rules: Vec<Value> = Rule::ALL.iter().filter(used).map(rule).collect();
        let log = json!({
            "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
            "version": "2.1.0",
            "runs": [{
                "tool": { "driver": {
                    "name": "granule lab check",
                    "version": env!("CARGO_PKG_VERSION"),
                    "rules": rules,
                } },
                "invocations": [{ "executionSuccessful": !self.has_error() }],
                "results": self.findings.iter().map(result).collect::<Vec<_>>(),
            }],
        });
        format!("{log:#}\n")
    }
}

fn result(finding: &ReportedFinding) -> Value {
    let defect = &finding.defect;
    let description = finding.rule().map_or("", Rule::description);
    let jobs: Vec<String> =
        finding.jobs.iter().map(|one| format!("{} {}", one.kernel, one.job)).collect();
    let text = format!(
        "{description} {} In {}; jobs: {}",
        defect.detail,
        finding.function(),
        jobs.join(", ")
    );
    let mut result = json!({
        "ruleId": defect.rule,
        "level": "error",
        "message": { "text": text },
        "occurrenceCount": finding.count(),
        "locations": defect.chain.first().map(location).into_iter().collect::<Vec<_>>(),
        "stacks": [{ "frames": defect.chain.iter()
            .map(|frame| json!({ "location": location(frame) }))
            .collect::<Vec<_>>() }],
        "partialFingerprints": { "ruleAndFunctions/v1": fingerprint(finding) },
    });
    if let Some(reason) = &finding.suppressed {
        result["suppressions"] = json!([{ "kind": "external", "justification": reason }]);
    }
    result
}

/// Returns the text that identifies a finding in other runs.
fn fingerprint(finding: &ReportedFinding) -> String {
    let (rule, functions) = finding.defect.identity();
    format!("{rule} {}", functions.join(","))
}

fn location(frame: &Frame) -> Value {
    let name = frame.place.clone().unwrap_or_else(|| format!("{:#x}", frame.address));
    let mut location = json!({
        "logicalLocations": [{
            "name": frame.function().unwrap_or(&name),
            "fullyQualifiedName": name,
            "kind": "function",
        }],
    });
    if let Some((file, line)) = frame.line() {
        location["physicalLocation"] = json!({
            "artifactLocation": { "uri": file, "uriBaseId": "SRCROOT" },
            "region": { "startLine": line },
        });
    }
    location
}

#[cfg(test)]
mod tests {
    use super::{super::report::tests::report, *};

    #[test]
    fn the_log_has_rules_and_results_with_locations() {
        let text = report("returned-unclean leaf # known").sarif();

        let log: Value = serde_json::from_str(&text).unwrap();
        let run = &log["runs"][0];
        assert_eq!(log["version"], "2.1.0");
        assert_eq!(run["tool"]["driver"]["rules"].as_array().unwrap().len(), 2);
        assert_eq!(run["results"][0]["suppressions"][0]["justification"], "known");
        assert_eq!(run["results"][0]["occurrenceCount"], 4);
        let location = &run["results"][1]["locations"][0];
        assert_eq!(location["logicalLocations"][0]["name"], "leaf");
        assert_eq!(location["physicalLocation"]["region"]["startLine"], 512);
    }
}
