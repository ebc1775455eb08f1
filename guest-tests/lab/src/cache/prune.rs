// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Removal of entries from the cache.

use std::{fs, io, path::Path};

use super::{
    entry::{Entry, EntryKind, entries},
    format_size,
};
use crate::{
    command::CommandError,
    error::LabError,
    in_use,
    kernel::{CACHE_LOCK, lock_cache},
    options::Locations,
    report::print,
    shell::Shell,
};

/// Selection of the entries to remove.
#[derive(Debug, clap::Args)]
pub struct PruneOptions {
    /// Remove only entries without a use in this number of days
    #[arg(long, value_name = "DAYS")]
    older_than: Option<u64>,
    /// Remove all entries that a run can make again, with source packages unless --keep-packages is
    /// set
    #[arg(long, conflicts_with = "dry_run")]
    yes: bool,
    /// Keep source packages, which must be downloaded again
    #[arg(long)]
    keep_packages: bool,
    /// Also remove tools of scripts/setup, and unknown entries of other versions of granule
    #[arg(long)]
    all: bool,
    /// Print what would be removed, and remove nothing
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    locations: Locations,
}

impl PruneOptions {
    fn selects(&self, entry: &Entry) -> bool {
        (self.all || entry.kind.can_be_made_again())
            && !(self.keep_packages && entry.kind == EntryKind::Package)
            && self.older_than.is_none_or(|days| entry.days() >= days)
    }

    /// Reports whether nothing is removed: without a limit, a removal requires `--yes`.
    const fn only_prints(&self) -> bool {
        self.dry_run || !(self.yes || self.older_than.is_some())
    }
}

/// Removes the selected entries, while no kernel is built.
pub fn prune(options: &PruneOptions) -> Result<(), LabError> {
    let cache = options.locations.cache()?;
    if options.all && cache.is_dir() && !cache.join(CACHE_LOCK).is_file() {
        return Err(LabError::Unusable(format!(
            "{} has no file '{CACHE_LOCK}', so it is no cache of the lab, whose other files --all would \
             remove: set the cache with --cache",
            cache.display()
        )));
    }
    // A missing cache has no entry, and neither it nor its lock is created by a dry run.
    let _lock = match cache.is_dir() && !options.only_prints() {
        true => lock_cache(Shell::new(false), &cache)?,
        false => None,
    };
    let mut text = String::new();
    let (mut count, mut size) = (0usize, 0);
    for entry in entries(&cache)?.iter().filter(|entry| options.selects(entry)) {
        let failed = |error| CommandError::file("remove", &entry.path, error);
        let Some(_unused) = in_use::lock_for_removal(&entry.path).map_err(failed)? else {
            text += &format!("kept {}: a run uses it\n", entry.name);
            continue;
        };
        if !options.only_prints() {
            remove(&entry.path).map_err(failed)?;
        }
        count += 1;
        size += entry.size;
        text += &format!("{} {} ({})\n", options.verb(), entry.name, format_size(entry.size));
    }
    let entries = if count == 1 { "entry" } else { "entries" };
    print(&format!("{text}{} {count} {entries}, {}\n", options.verb(), format_size(size)))?;
    if options.only_prints() && !options.dry_run && count > 0 {
        print("To remove them, add --yes; to keep some, --older-than DAYS or --keep-packages.\n")?;
    }
    Ok(())
}

impl PruneOptions {
    const fn verb(&self) -> &'static str {
        if self.only_prints() { "would remove" } else { "removed" }
    }
}

fn remove(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path)?.is_dir() {
        true => fs::remove_dir_all(path),
        false => fs::remove_file(path),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::shell::sorted_entries;

    #[derive(Debug, Parser)]
    struct TestArgs {
        #[command(flatten)]
        options: PruneOptions,
    }

    /// Prunes a cache with an entry of each kind, of which the kernel is used 40 days ago, and
    /// returns the names of all remaining entries.
    fn remaining(arguments: &str) -> String {
        let cache = tempfile::tempdir().unwrap();
        let path = cache.path();
        fs::write(path.join(CACHE_LOCK), "").unwrap();
        for name in ["kernels/1", "objects/2", "sources/3", "tools/bin", "future/4"] {
            fs::create_dir_all(path.join(name)).unwrap();
        }
        fs::create_dir(path.join("packages")).unwrap();
        fs::write(path.join("packages/5.deb"), "x").unwrap();
        let old = std::time::SystemTime::now() - std::time::Duration::from_secs(40 * 86_400);
        fs::File::create(path.join("kernels/1/in-use")).unwrap().set_modified(old).unwrap();
        let arguments = format!("prune --cache {} {arguments}", path.display());
        let TestArgs { options } = TestArgs::parse_from(arguments.split_whitespace());

        prune(&options).unwrap();

        let inner = |name: &String| {
            let entries = sorted_entries(&path.join(name));
            entries.into_iter().map(move |entry| format!("{name}/{entry}")).collect::<Vec<_>>()
        };
        sorted_entries(path).iter().flat_map(inner).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn what_a_run_makes_again_is_removed() {
        let all = "future/4 kernels/1 objects/2 packages/5.deb sources/3 tools/bin";
        for (arguments, expected) in [
            ("", all),
            ("--keep-packages", all),
            ("--yes", "future/4 tools/bin"),
            ("--yes --keep-packages", "future/4 packages/5.deb tools/bin"),
            ("--older-than 30", "future/4 objects/2 packages/5.deb sources/3 tools/bin"),
            ("--all", all),
            ("--all --yes", ""),
            ("--all --dry-run", all),
        ] {
            assert_eq!(remaining(arguments), expected, "{arguments}");
        }
    }

    #[test]
    fn the_files_of_another_directory_are_kept() {
        let home = tempfile::tempdir().unwrap();
        fs::write(home.path().join("letter"), "x").unwrap();
        let arguments = ["prune", "--all", "--yes", "--cache", home.path().to_str().unwrap()];
        let TestArgs { options } = TestArgs::parse_from(arguments);

        let error = prune(&options).unwrap_err().to_string();

        assert!(error.contains("no cache of the lab"), "{error}");
        assert!(home.path().join("letter").is_file());
    }

    #[test]
    fn an_entry_in_use_is_kept() {
        let cache = tempfile::tempdir().unwrap();
        let kernel = cache.path().join("kernels/1");
        fs::create_dir_all(&kernel).unwrap();
        let arguments = ["prune", "--yes", "--cache", cache.path().to_str().unwrap()];
        let TestArgs { options } = TestArgs::parse_from(arguments);
        let in_use = in_use::mark(&kernel).unwrap();

        prune(&options).unwrap();
        let kept = kernel.is_dir();
        drop(in_use);
        prune(&options).unwrap();

        assert!(kept && !kernel.exists());
    }
}
