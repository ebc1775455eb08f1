// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Kills a process a hundred times at random moments and checks what the next process finds.
//!
//! The victim is this test in a child process, with all parts of `granule run` that leave state
//! behind or acknowledge writes: control socket, raw terminal, tap, and a locked disk whose device
//! runs behind its real registers in its worker thread. It has no vCPU and therefore runs on any
//! host; `tests/guest` kills the whole program with a guest. A driver in the victim writes numbered
//! sectors, flushes each, and prints the number once it is acknowledged.
//!
//! A killed process loses no page cache. The test therefore shows that no write is acknowledged
//! before it is complete, not that a host keeps it through a power failure.

use std::{
    env, fs,
    io::{BufRead as _, BufReader, Read as _},
    os::fd::OwnedFd,
    path::Path,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use rand_core::{Rng as _, SeedableRng as _};
use rand_xoshiro::Xoshiro256StarStar;
use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, tcgetattr},
};

use super::{
    api::{Api, BoundSocket},
    terminal::Terminal,
};
use crate::devices::virtio::{
    block::{Block, Disk},
    net::Tap,
    testing::{Buffer, Driver, child_test},
};

const KILLS: u64 = 100;
const TAP: &str = "granule-kill";
const SECTORS: u64 = 64;
const SECTOR: usize = 512;

// Environment of a victim.
/// Number of writes.
const WRITES: &str = "GRANULE_TEST_VICTIM";
const FOLDER: &str = "GRANULE_TEST_FOLDER";
const WITH_TAP: &str = "GRANULE_TEST_TAP";

// Request types (virtio 1.2, section 5.2.6).
const OUT: u32 = 1;
const FLUSH: u32 = 4;
/// Feature bit of [`FLUSH`].
const FLUSH_FEATURE: u64 = 1 << 9;

/// Sends a request to the disk and waits until it is complete.
fn request(disk: &mut Driver, request_type: u32, sector: u64, data: Option<Vec<u8>>) {
    let mut buffers = vec![Buffer::block_header(request_type, sector)];
    buffers.extend(data.map(Buffer::Out));
    buffers.push(Buffer::In(1));
    assert_eq!(disk.request(0, &buffers).0, [[0]]);
}

/// Returns the contents of the sector with this number: copies of the number.
fn record(number: u64) -> Vec<u8> {
    number.to_le_bytes().repeat(SECTOR / 8)
}

/// Runs in the victim: prints each part that it has opened, then each acknowledged number.
fn run_victim(folder: &Path, writes: u64) {
    let socket = BoundSocket::new(&folder.join("socket")).unwrap();
    let _api = Api::serve(socket, || Ok(())).unwrap();
    println!("socket");
    let _terminal = Terminal::raw().unwrap().unwrap();
    println!("terminal");
    let _tap = env::var_os(WITH_TAP).map(|_| Tap::open(TAP).unwrap());
    println!("tap");
    let disk = Disk::open(&folder.join("disk"), false).unwrap();
    let mut disk = Driver::start(Box::new(Block::new(disk, "disk0")), FLUSH_FEATURE);
    println!("disk");
    for number in 1..=writes {
        request(&mut disk, OUT, number % SECTORS, Some(record(number)));
        request(&mut disk, FLUSH, 0, None);
        println!("{number}");
    }
}

/// Returns both ends of a terminal.
fn open_terminal() -> (OwnedFd, OwnedFd) {
    let main = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&main).unwrap();
    unlockpt(&main).unwrap();
    let name = ptsname(&main, Vec::new()).unwrap();
    let mut options = fs::OpenOptions::new();
    let end = options.read(true).write(true).open(name.to_str().unwrap());
    (main, end.unwrap().into())
}

fn start_victim(folder: &Path, terminal: &OwnedFd, writes: u64, tap: bool) -> Child {
    let mut command = child_test("vm::killed::a_killed_process_does_not_impede_the_next");
    if tap {
        command.env(WITH_TAP, "yes");
    }
    command
        .env(WRITES, writes.to_string())
        .env(FOLDER, folder)
        .stdin(Stdio::from(terminal.try_clone().unwrap()))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Starts a victim, kills it `delay` after its start or its first write, and returns the last
/// number that it printed.
fn kill_victim(mut child: Child, after_first_write: bool, delay: Duration) -> u64 {
    let mut output = BufReader::new(child.stdout.take().unwrap());
    if after_first_write {
        let deadline = Instant::now() + Duration::from_secs(60);
        let mut line = String::new();
        while line.trim() != "1" {
            line.clear();
            let count = output.read_line(&mut line).unwrap();
            let running = count > 0 && Instant::now() < deadline;
            assert!(running, "{}", errors(&mut child));
        }
    }
    thread::sleep(delay);
    child.kill().unwrap();
    let status = child.wait().unwrap();
    let mut rest = String::new();
    output.read_to_string(&mut rest).unwrap();

    // A victim that exits by itself has failed on the state of the one before.
    assert_eq!(status.code(), None, "{}", errors(&mut child));
    // The last line may be incomplete.
    let complete = rest.rsplit_once('\n').map_or("", |(complete, _)| complete);
    let mut numbers = complete.lines().rev().map(str::parse::<u64>);
    let last = numbers.find_map(Result::ok);
    last.unwrap_or(after_first_write.into())
}

/// Checks that the disk has each acknowledged number, unless a later one has replaced it.
fn check_disk(disk: &Path, last: u64) {
    let bytes = fs::read(disk).unwrap();
    let (sectors, _) = bytes.as_chunks::<SECTOR>();
    // The sector after the last number may hold a write in flight.
    for number in last.saturating_sub(SECTORS - 2).max(1)..=last {
        let sector = &sectors[usize::try_from(number % SECTORS).unwrap()];
        let found = u64::from_le_bytes(*sector.first_chunk().unwrap());
        assert!(found >= number, "{number} is lost");
        assert_eq!(sector[..], record(found), "{number} is torn");
    }
}

#[test]
fn a_killed_process_does_not_impede_the_next() {
    if let (Ok(writes), Some(folder)) = (env::var(WRITES), env::var_os(FOLDER)) {
        return run_victim(Path::new(&folder), writes.parse().unwrap());
    }
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    let tap = Tap::open(TAP).map(drop);
    if let Err(error) = &tap {
        granule_types::testing::skip(format_args!("the part with a tap: {error}"));
    }
    let empty_disk = || {
        let size = usize::try_from(SECTORS).unwrap() * SECTOR;
        fs::write(&disk, vec![0; size]).unwrap();
    };
    let (_main, terminal) = open_terminal();
    let start = |writes| start_victim(folder.path(), &terminal, writes, tap.is_ok());
    let mut random = Xoshiro256StarStar::seed_from_u64(1);
    let (mut acknowledged, mut writing) = (0, 0);

    for kill in 0..KILLS {
        empty_disk();
        let delay = Duration::from_micros(random.next_u64() % 20_000);
        let last = kill_victim(start(u64::MAX), kill % 2 == 1, delay);
        check_disk(&disk, last);
        acknowledged += last;
        writing += u64::from(last > 0);
    }

    // Killed victims leave the terminal raw; one that exits restores a usable mode.
    let before = tcgetattr(&terminal).unwrap().local_modes;
    let output = start(8).wait_with_output().unwrap();
    let after = tcgetattr(&terminal).unwrap().local_modes;
    assert!(output.status.success(), "{output:?}");
    assert!(!before.contains(LocalModes::ICANON));
    assert!(after.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG));
    assert!(writing >= KILLS / 2, "{writing}");
    println!("{KILLS} kills, {writing} while writing, {acknowledged} writes acknowledged");
}

/// Kills a victim and returns its errors.
fn errors(child: &mut Child) -> String {
    let _ = child.kill();
    let mut errors = String::new();
    if let Some(stderr) = &mut child.stderr {
        let _ = stderr.read_to_string(&mut errors);
    }
    errors
}
