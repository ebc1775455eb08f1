// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The first process of a guest that `granule run` starts in the emulated host.
//!
//! It says that it runs, uses its memory a little as a system that comes up does, says what
//! machine it finds, and switches it off. Its words are what the lab looks for on the console.

use std::{fs, path::Path};

use rustix::{
    mount::{MountFlags, mount},
    process::{Pid, getpid},
    system::{RebootCommand, reboot},
};

/// The file that tells a guest's initramfs.
pub const MARKER: &str = "/guest";
/// What it says first: the guest is at its init.
pub const INIT: &str = "granule-guest: init";
/// What it says of a machine that works, its vCPUs and memory behind it.
pub const WORKS: &str = "granule-guest: works";

/// How much memory it fills and reads back, if there is four times as much.
const USED: usize = 16 << 20;

/// Whether this process is a guest's PID 1.
pub fn is_wanted() -> bool {
    getpid() == Pid::INIT && Path::new(MARKER).exists()
}

/// Does its work and switches the machine off; only a machine that cannot be switched off returns.
pub fn run() {
    println!("{INIT}");
    match look() {
        Ok(seen) => println!("{WORKS}, {seen}"),
        Err(error) => println!("granule-guest: {error}"),
    }
    if let Err(error) = rustix::termios::tcdrain(std::io::stdout()) {
        println!("granule-guest: tcdrain: {error}");
    }
    if let Err(error) = reboot(RebootCommand::PowerOff) {
        println!("granule-guest: cannot switch off: {error}");
    }
}

fn look() -> std::io::Result<String> {
    mount("proc", "/proc", "proc", MountFlags::empty(), None)?;
    let cpus = std::thread::available_parallelism()?;
    let text = fs::read_to_string("/proc/meminfo")?;
    let kib: usize = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB"))
        .and_then(|number| number.trim().parse().ok())
        .unwrap_or(0);
    // Each vCPU has its part, so that all of them fault.
    let part = USED.min((kib << 10) / 4) / cpus.get();
    let threads: Vec<_> = (0..cpus.get())
        .map(|cpu| std::thread::spawn(move || use_memory(cpu, part)))
        .collect();
    let wrong = threads
        .into_iter()
        .map(|thread| thread.join().unwrap_or(usize::MAX))
        .fold(0usize, usize::saturating_add);
    if wrong > 0 {
        return Err(std::io::Error::other(format!(
            "{wrong} words of memory did not hold what was written"
        )));
    }
    Ok(format!("vcpus {cpus}, memory {} MiB", kib >> 10))
}

/// Writes every word of so much memory and reads it back: how many were wrong.
fn use_memory(seed: usize, bytes: usize) -> usize {
    let value = |index: usize| (index ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let words: Vec<usize> = (0..bytes / size_of::<usize>()).map(value).collect();
    let words = std::hint::black_box(words);
    let wrong = |(index, word): &(usize, &usize)| **word != value(*index);
    words.iter().enumerate().filter(wrong).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_holds_what_was_written() {
        assert_eq!(use_memory(3, 1 << 16), 0);
    }

    #[test]
    fn this_process_is_no_guest() {
        assert!(!is_wanted());
    }
}
