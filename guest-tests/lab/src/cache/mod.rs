// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule cache`: lists and prunes the cache of the lab.

mod entry;
mod prune;

use std::path::PathBuf;

use granule_types::units::pluralize;

pub use self::prune::PruneOptions;
use self::{entry::entries, prune::prune};
use crate::{
    error::LabError, observing_emulator::find_observing_emulator, options::Locations,
    report::print, shell::Shell,
};

/// Commands on the cache.
#[derive(Debug, clap::Subcommand)]
pub enum CacheCommand {
    /// List each entry with its size and its last use
    Ls {
        /// Repository and cache
        #[command(flatten)]
        locations: Locations,
    },
    /// Remove what a run can make again; entries that a run uses stay
    Prune(PruneOptions),
    /// Print the program of a QEMU whose plugins can trace; download it if this machine's is older
    Qemu {
        /// Repository and cache
        #[command(flatten)]
        locations: Locations,
        /// QEMU's program for arm64
        #[arg(long, value_name = "PROGRAM", default_value = "qemu-system-aarch64")]
        qemu: PathBuf,
    },
}

/// Executes a command on the cache.
///
/// # Errors
/// The cache cannot be read, or an entry cannot be removed.
pub fn execute(command: &CacheCommand) -> Result<(), LabError> {
    match command {
        CacheCommand::Ls { locations } => list(locations),
        CacheCommand::Prune(options) => prune(options),
        CacheCommand::Qemu { locations, qemu } => {
            let program = find_observing_emulator(Shell::new(false), &locations.cache()?, qemu)?;
            print(&format!("{}\n", program.display()))
        }
    }
}

fn list(locations: &Locations) -> Result<(), LabError> {
    let cache = locations.cache()?;
    let entries = entries(&cache)?;
    let mut text = String::new();
    if !entries.is_empty() {
        text += &format!("{:<15} {:>9} {:<12} {}\n", "kind", "size", "last use", "name");
    }
    for entry in &entries {
        text += &format!(
            "{:<15} {:>9} {:<12} {}\n",
            entry.kind.to_string(),
            format_size(entry.size),
            entry.describe_age(),
            entry.description()
        );
    }
    let total: u64 = entries.iter().map(|entry| entry.size).sum();
    let count = match entries.len() {
        1 => "1 entry".to_owned(),
        count => format!("{count} entries"),
    };
    print(&format!("{text}{count}, {} in {}\n", format_size(total), cache.display()))
}

/// Formats a size with one decimal place.
fn format_size(bytes: u64) -> String {
    #[expect(clippy::cast_precision_loss, reason = "a size for display")]
    let scaled = |shift: u32| bytes as f64 / (1u64 << shift) as f64;
    match bytes {
        0x4000_0000.. => format!("{:.1}G", scaled(30)),
        0x10_0000.. => format!("{:.1}M", scaled(20)),
        _ => format!("{:.1}K", scaled(10)),
    }
}

/// Formats an age in days.
fn format_days(days: u64) -> String {
    match days {
        0 => "today".to_owned(),
        days => format!("{} ago", pluralize(days, "day")),
    }
}
