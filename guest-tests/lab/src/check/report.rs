// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Report of a check: each defect once, with the jobs in which it occurred.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
};

use granule_stage2::check::Rule;
use granule_types::units::pluralize;
use serde::Serialize;
use serde_json::json;

use super::{
    defect::{Change, Checked, Defect, Frame, Step},
    history::{describe_entry, describe_stage1_entry},
    setup::Unapplied,
    suppressions::Suppression,
};

/// Error of a kernel whose jobs start no guest.
const NO_GUEST: &str = "no guest's tables were changed, so nothing was checked";

/// A job and its result.
#[derive(Debug, Clone)]
pub struct CheckedJob {
    pub kernel: String,
    pub job: String,
    /// Indicates that a guest's tables have to be checked: those of the kernel do not suffice.
    pub needs_guest: bool,
    /// `None` if the job was not observed.
    pub checked: Option<Checked>,
    /// Reason for which the job failed.
    pub error: Option<String>,
}

/// Findings of all jobs.
#[derive(Debug)]
pub struct Report {
    pub jobs: Vec<CheckedJob>,
    pub findings: Vec<ReportedFinding>,
    unapplied: Vec<(Unapplied, Vec<String>)>,
    unused: Vec<Suppression>,
    /// The step that lets a kernel without a guest start one.
    remedy: &'static str,
}

/// A defect and its occurrences.
#[derive(Debug, Serialize)]
pub struct ReportedFinding {
    /// The first occurrence.
    #[serde(flatten)]
    pub defect: Defect,
    /// Reason for which it is accepted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub suppressed: Option<String>,
    pub jobs: Vec<Occurrence>,
}

/// Violations in one job.
#[derive(Debug, Serialize)]
pub struct Occurrence {
    pub kernel: String,
    pub job: String,
    pub count: u64,
}

impl ReportedFinding {
    /// Returns the rule.
    pub fn rule(&self) -> Option<Rule> {
        Rule::ALL.iter().find(|rule| rule.name() == self.defect.rule).copied()
    }

    /// Returns the innermost function.
    pub fn function(&self) -> String {
        self.defect.functions().into_iter().next().unwrap_or_else(|| "unknown code".to_owned())
    }

    pub fn count(&self) -> u64 {
        self.jobs.iter().map(|job| job.count).sum()
    }
}

impl Report {
    /// Returns the report of these jobs; `remedy` is the step that lets a kernel without a guest start
    /// one.
    pub fn new(jobs: Vec<CheckedJob>, suppressions: &[Suppression], remedy: &'static str) -> Self {
        let mut findings: Vec<ReportedFinding> = Vec::new();
        let mut known = BTreeMap::new();
        let mut unapplied: BTreeMap<Unapplied, Vec<String>> = BTreeMap::new();
        for CheckedJob { kernel, job, checked, .. } in &jobs {
            let Some(Checked { summary, defects }) = checked else { continue };
            for rule in &summary.unapplied {
                let kernels = unapplied.entry(rule.clone()).or_default();
                if !kernels.contains(kernel) {
                    kernels.push(kernel.clone());
                }
            }
            for defect in defects {
                // A line may name a function that does not identify the defect, and so apply to one
                // caller only.
                let applied = suppressions.iter().find(|line| line.applies_to(defect));
                let suppressed = applied.map(|line| line.reason.clone());
                let identity = (defect.identity(), suppressed.clone());
                let index = *known.entry(identity).or_insert(findings.len());
                if index == findings.len() {
                    let (defect, jobs) = (defect.clone(), Vec::new());
                    findings.push(ReportedFinding { defect, suppressed, jobs });
                }
                let (kernel, job, count) = (kernel.clone(), job.clone(), defect.count);
                let occurrences = &mut findings[index].jobs;
                match occurrences.iter_mut().find(|one| one.kernel == kernel && one.job == job) {
                    Some(occurrence) => occurrence.count += count,
                    None => occurrences.push(Occurrence { kernel, job, count }),
                }
            }
        }
        let all =
            || jobs.iter().filter_map(|job| job.checked.as_ref()).flat_map(|one| &one.defects);
        let is_used = |line: &Suppression| all().any(|defect| line.applies_to(defect));
        let unused = suppressions.iter().filter(|line| !is_used(line)).cloned().collect();
        Self { jobs, findings, unapplied: unapplied.into_iter().collect(), unused, remedy }
    }

    /// Returns the findings that are not accepted.
    pub fn defects(&self) -> impl Iterator<Item = &ReportedFinding> {
        self.findings.iter().filter(|finding| finding.suppressed.is_none())
    }

    /// Reports whether a job failed, or a kernel has not been checked.
    pub fn has_error(&self) -> bool {
        self.jobs.iter().any(CheckedJob::has_error) || !self.unchecked_kernels().is_empty()
    }

    /// Returns the kernels whose jobs ran no guest that could be checked, although none failed.
    fn unchecked_kernels(&self) -> BTreeSet<&str> {
        let kernels = |selects: fn(&CheckedJob) -> bool| {
            let jobs = self.jobs.iter().filter(move |job| selects(job));
            jobs.map(|job| job.kernel.as_str()).collect::<BTreeSet<_>>()
        };
        let has_reason = |job: &CheckedJob| job.stores() > Some(0) || job.has_error();
        kernels(|_| true).difference(&kernels(has_reason)).copied().collect()
    }

    /// Formats the report as text.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for finding in self.defects() {
            write_finding(&mut text, finding);
        }
        self.write_jobs(&mut text);
        self.write_suppressions(&mut text);
        self.write_unapplied(&mut text);
        for kernel in self.unchecked_kernels() {
            writeln_to(&mut text, format_args!("{kernel}: error: {NO_GUEST}: {}", self.remedy));
        }
        let defects = pluralize(self.defects().count(), "finding");
        let suppressed = self.findings.len() - self.defects().count();
        let suppressed = match suppressed {
            0 => String::new(),
            count => format!(", {count} suppressed"),
        };
        writeln_to(&mut text, format_args!("{defects}{suppressed}"));
        text
    }

    fn write_jobs(&self, text: &mut String) {
        for job in &self.jobs {
            let name = format!("{} {}", job.kernel, job.job);
            if let Some(Checked { summary, .. }) = &job.checked {
                let mut line = format!(
                    "{name}: {} of {}, {} to tables",
                    pluralize(summary.events, "event"),
                    pluralize(summary.guests, "guest"),
                    pluralize(summary.stores, "store")
                );
                for (bound, count, what) in [
                    ("at most ", summary.most_leaves, "leaves at once"),
                    ("at most ", summary.saved_tlb_entries, "TLB entries saved by contiguous runs"),
                    (
                        "",
                        summary.unsupported_guests,
                        "guests with an unsupported geometry not checked",
                    ),
                    ("", summary.host_tables, "stage-2 tables of the host not checked"),
                    ("", summary.nested_tables, "tables of nested guests not checked"),
                    ("", summary.kernel_stores, "stores to the kernel's own tables"),
                ] {
                    if count > 0 {
                        line += &format!("; {bound}{count} {what}");
                    }
                }
                writeln_to(text, format_args!("{line}"));
            }
            for error in job.errors() {
                writeln_to(text, format_args!("{name}: error: {error}"));
            }
        }
    }

    fn write_suppressions(&self, text: &mut String) {
        for finding in &self.findings {
            let Some(reason) = &finding.suppressed else { continue };
            let (rule, function) = (&finding.defect.rule, finding.function());
            let count = pluralize(finding.count(), "violation");
            writeln_to(text, format_args!("suppressed: {rule} in {function}, {count}: {reason}"));
        }
        for line in &self.unused {
            let (name, number) = (line.name(), line.line);
            writeln_to(text, format_args!("unused suppression in line {number}: {name}"));
        }
    }

    fn write_unapplied(&self, text: &mut String) {
        let mut missing: BTreeMap<&str, &[String]> = BTreeMap::new();
        for job in &self.jobs {
            let found = job.checked.as_ref().map(|checked| checked.summary.missing.as_slice());
            missing.extend(found.map(|names| (job.kernel.as_str(), names)));
        }
        for (kernel, names) in missing.into_iter().filter(|(_, names)| !names.is_empty()) {
            writeln_to(text, format_args!("not found in {kernel}: {}", names.join(", ")));
        }
        let mut by_reason: BTreeMap<(&str, &[String]), Vec<&str>> = BTreeMap::new();
        for (Unapplied { rule, reason }, kernels) in &self.unapplied {
            by_reason.entry((reason, kernels)).or_default().push(rule);
        }
        for ((reason, kernels), rules) in by_reason {
            let (kernels, rules) = (kernels.join(", "), rules.join(", "));
            writeln_to(text, format_args!("not applied to {kernels}, because {reason}: {rules}"));
        }
    }

    /// Formats the report as JSON lines: a summary, then each finding.
    pub fn json_lines(&self) -> String {
        let job = |job: &CheckedJob| {
            let summary = job.checked.as_ref().map(|checked| &checked.summary);
            let errors: Vec<_> = job.errors().collect();
            json!({
                "kernel": job.kernel,
                "job": job.job,
                "events": summary.map(|summary| summary.events),
                "guests": summary.map(|summary| summary.guests),
                "unsupported_guests": summary.map(|summary| summary.unsupported_guests),
                "host_tables": summary.map(|summary| summary.host_tables),
                "nested_tables": summary.map(|summary| summary.nested_tables),
                "most_leaves": summary.map(|summary| summary.most_leaves),
                "saved_tlb_entries": summary.map(|summary| summary.saved_tlb_entries),
                "stores": summary.map(|summary| summary.stores),
                "kernel_stores": summary.map(|summary| summary.kernel_stores),
                "missing": summary.map(|summary| &summary.missing),
                "errors": errors,
            })
        };
        let unapplied = |(rule, kernels): &(Unapplied, Vec<String>)| json!({ "rule": rule.rule, "reason": rule.reason, "kernels": kernels });
        let summary = json!({
            "schema": "granule.check/1",
            "findings": self.findings.len(),
            "suppressed": self.findings.len() - self.defects().count(),
            "jobs": self.jobs.iter().map(job).collect::<Vec<_>>(),
            "kernels_without_guest": self.unchecked_kernels(),
            "unapplied": self.unapplied.iter().map(unapplied).collect::<Vec<_>>(),
            "unused_suppressions":
                self.unused.iter().map(Suppression::name).collect::<Vec<_>>(),
        });
        let findings = self.findings.iter().map(|finding| {
            let mut value = json!(finding);
            value["description"] = json!(finding.rule().map(Rule::description));
            value["source"] = json!(finding.rule().map(Rule::source));
            value
        });
        std::iter::once(summary).chain(findings).map(|value| format!("{value}\n")).collect()
    }
}

impl CheckedJob {
    /// Returns the number of stores to tables that were checked, if the job was observed.
    fn stores(&self) -> Option<u64> {
        let summary = self.checked.as_ref().map(|checked| &checked.summary);
        summary.map(|summary| match self.needs_guest {
            true => summary.stores,
            false => summary.stores + summary.kernel_stores,
        })
    }

    /// Returns the errors of the job and of its trace.
    fn errors(&self) -> impl Iterator<Item = &str> {
        let of_trace = self.checked.as_ref().and_then(|checked| checked.summary.error.as_deref());
        self.error.as_deref().into_iter().chain(of_trace)
    }

    fn has_error(&self) -> bool {
        self.errors().next().is_some()
    }
}

fn write_finding(text: &mut String, finding: &ReportedFinding) {
    let Defect { rule, detail, cpu, event, root, is_kernel, .. } = &finding.defect;
    let Defect { change, chain, history, .. } = &finding.defect;
    let (owner, space) = if *is_kernel { ("kernel", "kernel") } else { ("guest of", "guest") };
    let count = pluralize(finding.count(), "violation");
    writeln_to(text, format_args!("{rule} in {}: {count}", finding.function()));
    if let Some(rule) = finding.rule() {
        writeln_to(text, format_args!("  {} [{}]", rule.description(), rule.source()));
    }
    writeln_to(text, format_args!("  first: {detail}"));
    writeln_to(text, format_args!("  by CPU {cpu}, {owner} root {root:#x}, event {event}"));
    if let Some(Change { ipa, level, old, new }) = change {
        let describe = if *is_kernel { describe_stage1_entry } else { describe_entry };
        let (old, new) = (describe(*old), describe(*new));
        let entry = format!("{space} address {ipa:#x}, level {level}: {new}; before: {old}");
        writeln_to(text, format_args!("  last change by CPU {cpu}: {entry}"));
    }
    for Occurrence { kernel, job, count } in &finding.jobs {
        writeln_to(text, format_args!("  {count} in {kernel} {job}"));
    }
    writeln_to(text, format_args!("  call chain:"));
    for Frame { address, place } in chain {
        match place {
            Some(place) => writeln_to(text, format_args!("    {place}")),
            None => writeln_to(text, format_args!("    {address:#x}")),
        }
    }
    writeln_to(text, format_args!("  events:"));
    for Step { event, cpu, text: step, place } in history {
        let place = place.as_ref().map_or_else(String::new, |place| format!(" in {place}"));
        writeln_to(text, format_args!("    {event} CPU {cpu}: {step}{place}"));
    }
    text.push('\n');
}

/// Appends a line.
fn writeln_to(text: &mut String, line: std::fmt::Arguments<'_>) {
    // Writing to a String cannot fail.
    let _ = writeln!(text, "{line}");
}

#[cfg(test)]
pub mod tests {
    use super::{
        super::{
            defect::tests::{checked, defect},
            suppressions,
        },
        *,
    };

    const REMEDY: &str = "start a guest";

    fn job(kernel: &str, checked: Checked) -> CheckedJob {
        let (kernel, job) = (kernel.to_owned(), "anonymous".to_owned());
        CheckedJob { kernel, job, needs_guest: true, checked: Some(checked), error: None }
    }

    /// Returns a report with a finding of two kernels and one of the first kernel.
    pub fn report(suppressed: &str) -> Report {
        let both = || defect("returned-unclean", &["leaf", "walk"]);
        let mut first = checked(vec![both(), defect("break-before-make", &["leaf"])]);
        let unapplied =
            Unapplied { rule: "outside-slot".to_owned(), reason: "memslots are hidden".to_owned() };
        first.summary.unapplied.push(unapplied);
        let jobs = vec![job("base", first), job("series", checked(vec![both()]))];
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), suppressed).unwrap();
        Report::new(jobs, &suppressions::read(file.path()).unwrap(), REMEDY)
    }

    #[test]
    fn a_defect_of_two_jobs_is_one_finding_with_both_jobs() {
        let report = report("");

        let counts: Vec<_> =
            report.findings.iter().map(|one| (one.jobs.len(), one.count())).collect();

        assert_eq!(counts, [(2, 4), (1, 2)]);
        let text = report.text();
        for part in [
            "returned-unclean in leaf: 4 violations\n",
            "[Arm ARM, mismatched memory attributes]\n",
            "  last change by CPU 1: guest address 0x4000, level 3: page → ",
            "  2 in series anonymous\n",
            "    leaf+0x94 arch/arm64/kvm/mmu.c:512\n",
            "    41 CPU 1: DSB ISHST\n",
            "not found in base: hva_to_pfn\n",
            "base anonymous: 1000 events of 1 guest, 10 stores to tables; \
             at most 48 leaves at once; at most 30 TLB entries saved by contiguous runs\n",
            "not applied to base, because memslots are hidden: outside-slot\n",
            "\n2 findings\n",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }

    #[test]
    fn a_suppressed_finding_is_counted_and_an_unused_line_is_named() {
        let suppressions = "returned-unclean leaf # known\nwrong-ttl leaf # unused\n";

        let text = report(suppressions).text();

        assert!(text.contains("suppressed: returned-unclean in leaf, 4 violations: known\n"));
        assert!(text.contains("unused suppression in line 2: wrong-ttl leaf\n"));
        assert!(text.ends_with("1 finding, 1 suppressed\n"), "{text}");
    }

    #[test]
    fn a_suppression_of_one_caller_applies_to_the_jobs_with_this_caller() {
        let of = |kernel, caller| {
            job(kernel, checked(vec![defect("returned-unclean", &["a", "b", "c", "d", caller])]))
        };
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "returned-unclean second # known\n").unwrap();
        let lines = suppressions::read(file.path()).unwrap();

        for callers in [["first", "second"], ["second", "first"]] {
            let jobs = callers.map(|caller| of(caller, caller)).to_vec();

            let report = Report::new(jobs, &lines, REMEDY);

            let kernels: Vec<_> = report.defects().map(|one| one.jobs[0].kernel.clone()).collect();
            assert_eq!(kernels, ["first"]);
            assert!(!report.text().contains("unused suppression"), "{}", report.text());
        }
    }

    #[test]
    fn the_json_lines_are_a_summary_and_each_finding() {
        let text = report("returned-unclean leaf # known").json_lines();

        let lines: Vec<serde_json::Value> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();

        assert_eq!(lines.len(), 3);
        assert_eq!((&lines[0]["findings"], &lines[0]["suppressed"]), (&json!(2), &json!(1)));
        assert_eq!(lines[1]["suppressed"], "known");
        assert_eq!(lines[2]["jobs"][0]["kernel"], "base");
        assert_eq!(lines[2]["source"], "Arm ARM R_WHZWS, R_DDMVT (break-before-make)");
    }

    #[test]
    fn a_kernel_without_a_guest_is_an_error() {
        let mut empty = checked(Vec::new());
        empty.summary.stores = 0;
        empty.summary.kernel_stores = 1;
        let jobs = vec![job("a", empty.clone()), job("a", checked(vec![])), job("b", empty)];

        let [one, both] = [&jobs[..2], &jobs].map(|jobs| Report::new(jobs.to_vec(), &[], REMEDY));

        assert!(!one.has_error() && both.has_error());
        let text = both.text();
        let error = format!("b: error: {NO_GUEST}: {REMEDY}\n");
        assert!(text.contains(&error), "{text}");
    }

    #[test]
    fn a_failed_job_is_an_error() {
        let mut truncated = checked(Vec::new());
        truncated.summary.error = Some("it has no last line".to_owned());
        let failed = CheckedJob { error: Some("crashed".to_owned()), ..job("x", checked(vec![])) };

        let reports = [job("x", truncated), failed, job("x", checked(Vec::new()))]
            .map(|job| Report::new(vec![job], &[], REMEDY));

        assert_eq!(reports.each_ref().map(Report::has_error), [true, true, false]);
        assert!(reports[1].text().contains("x anonymous: error: crashed"));
    }
}
