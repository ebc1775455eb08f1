// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule doctor`: checks this machine for KVM and for the lab, and changes nothing.

mod check;
mod kvm;
mod lab;
mod packages;

use std::{env, fs};

use granule_lab::Locations;

use super::{CommandOutcome, CommandResult, write_stdout};
use check::{Check, Group, Report};
use packages::{Distribution, tools};

/// Options of `granule doctor`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Exit code: 0 if nothing that one of the checked tasks needs is missing, 1 \
                  otherwise."
)]
pub struct Args {
    /// Task to check [default: both]
    #[arg(value_enum, value_name = "TASK")]
    group: Option<Group>,
    /// Print JSON (`granule.doctor/1`)
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    locations: Locations,
}

/// Runs `granule doctor`.
pub fn run(args: Args) -> CommandResult {
    let os_release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let detected = Distribution::of_os_release(&os_release);
    let distribution = detected.unwrap_or(Distribution::Debian);
    let groups = args.group.map_or_else(|| vec![Group::Kvm, Group::Lab], |group| vec![group]);
    let mut checks = Vec::new();
    for group in &groups {
        match group {
            Group::Kvm => checks.extend(kvm::checks()),
            Group::Lab => {
                checks.push(lab::distribution_check(&os_release, detected));
                checks.extend(lab_checks(&args.locations, distribution)?);
            }
        }
    }
    let report = Report { groups, checks, install: distribution.install_command() };
    write_stdout(&if args.json { report.json()? } else { report.text() })?;
    Ok(if report.passed() { CommandOutcome::Done } else { CommandOutcome::Failed })
}

fn lab_checks(
    locations: &Locations,
    distribution: Distribution,
) -> Result<Vec<Check>, granule_lab::LabError> {
    let path = env::var("PATH").unwrap_or_default();
    let tools = tools("lab", distribution, cfg!(target_arch = "aarch64"));
    let mut checks = lab::tool_checks(&tools, distribution, &path);
    checks.push(lab::rust_check(&path));
    checks.push(lab::disk_check(&locations.cache()?));
    checks.push(lab::memory_check(&fs::read_to_string("/proc/meminfo").unwrap_or_default()));
    Ok(checks)
}
