// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A process killed at random moments, a hundred times, and what the next one finds.
//!
//! The process is this test once more, with all of `granule run` that leaves something behind or
//! acknowledges something: the control socket, the raw terminal, a tap, a locked disk and its device
//! behind the real registers with its real thread. No vCPU is in it, so it runs on any host; the
//! whole program with a guest is killed in `tests/guest`. A driver in it writes one number after the
//! other to the disk, flushes, and prints what was acknowledged.
//!
//! A kill takes no page cache with it, so this shows that nothing is acknowledged before it was
//! written, and not that a host keeps it when its power fails.

#![allow(clippy::unwrap_used, reason = "a failed test tells where")]

use std::{
    env, fs,
    io::{BufRead as _, BufReader, Read as _},
    os::fd::OwnedFd,
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use granule_types::units::{Bytes, GuestAddress};
use granule_vmm::{
    devices::{
        MmioDevice as _,
        virtio::{
            Transport,
            block::{Block, Disk},
            net::Tap,
        },
    },
    memory::{GuestMemory, GuestRam, HostPages, Plan},
    vm::{api::Api, socket::BoundSocket, terminal::Terminal},
};
use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, tcgetattr},
};
use vm_memory::Bytes as _;
use vmm_sys_util::eventfd::EventFd;

const KILLS: u64 = 100;
const VICTIM: &str = "GRANULE_TEST_VICTIM";
const TAP: &str = "granule-kill";
const START: u64 = 0x4000_0000;
const SECTORS: u64 = 64;
const BYTES: usize = 64 * 512;

/// The disk's driver: one request at a time.
struct Driver {
    transport: Transport,
    memory: std::sync::Arc<GuestMemory>,
    done: u16,
}

const TABLE: u64 = START;
const AVAILABLE: u64 = START + 0x1000;
const USED: u64 = START + 0x2000;
const HEADER: u64 = START + 0x3000;
const DATA: u64 = START + 0x4000;
const STATUS: u64 = START + 0x5000;

impl Driver {
    fn new(disk: &Path) -> Self {
        let host = HostPages::of_this_host().unwrap();
        let plan = Plan::new("anonymous".parse().unwrap(), &host).unwrap();
        let start = GuestAddress(START);
        let ram = GuestRam::new(plan, &host, start, Bytes::mib(1), false).unwrap();
        let memory = std::sync::Arc::new(GuestMemory::new(vec![ram]).unwrap());
        let device = Block::new(Disk::open(disk, false).unwrap(), "disk0");
        let irq = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let shared = std::sync::Arc::clone(&memory);
        let transport = Transport::new("disk0", Box::new(device), shared, irq).unwrap();
        let mut driver = Self {
            transport,
            memory,
            done: 0,
        };
        // Reset, acknowledge, driver; version 1 and flushes; features; the queue; go.
        for (register, value) in [
            (0x70, 0),
            (0x70, 1),
            (0x70, 3),
            (0x24, 0),
            (0x20, 1 << 9),
            (0x24, 1),
            (0x20, 1),
            (0x70, 11),
            (0x30, 0),
            (0x38, 8),
            (0x80, TABLE),
            (0x90, AVAILABLE),
            (0xa0, USED),
            (0x44, 1),
            (0x70, 15),
        ] {
            driver.set(register, value);
        }
        driver
    }

    fn set(&mut self, register: u64, value: u64) {
        let [a, b, c, d, ..] = value.to_le_bytes();
        assert!(self.transport.write(register, &[a, b, c, d]));
    }

    fn put(&self, address: u64, bytes: &[u8]) {
        let place = vm_memory::GuestAddress(address);
        self.memory.map().write_slice(bytes, place).unwrap();
    }

    /// A request of this kind, with a sector of data to be written or none; until it is done.
    fn ask(&mut self, kind: u32, sector: u64, data: Option<&[u8; 512]>) {
        self.put(HEADER, &u64::from(kind).to_le_bytes());
        self.put(HEADER + 8, &sector.to_le_bytes());
        self.put(STATUS, &[0xff]);
        let mut buffers = vec![(HEADER, 16u32, 0u16)];
        if let Some(data) = data {
            self.put(DATA, data);
            buffers.push((DATA, 512, 0));
        }
        buffers.push((STATUS, 1, 2));
        let last = buffers.len() - 1;
        for (index, (address, length, flags)) in buffers.into_iter().enumerate() {
            let next = u16::from(index < last);
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(length.to_le_bytes());
            bytes.extend((flags | next).to_le_bytes());
            bytes.extend(u16::try_from(index + 1).unwrap().to_le_bytes());
            self.put(TABLE + index as u64 * 16, &bytes);
        }
        self.done = self.done.wrapping_add(1);
        self.put(AVAILABLE + 2, &self.done.to_le_bytes());
        self.set(0x50, 0);
        let used = vm_memory::GuestAddress(USED + 2);
        while self.memory.map().read_obj::<u16>(used).unwrap() != self.done {
            thread::yield_now();
        }
        let status = vm_memory::GuestAddress(STATUS);
        assert_eq!(self.memory.map().read_obj::<u8>(status).unwrap(), 0);
    }
}

/// What is killed. It says each thing it has got, and then each number that is safe.
fn be_killed(folder: &Path, what: &str) {
    let socket = BoundSocket::new(&folder.join("socket")).unwrap();
    let _api = Api::serve(socket, || Ok(())).unwrap();
    println!("socket");
    let _terminal = Terminal::raw().unwrap().unwrap();
    println!("terminal");
    let _tap = env::var_os("GRANULE_TEST_TAP").map(|_| Tap::open(TAP).unwrap());
    println!("tap");
    let mut disk = Driver::new(&folder.join("disk"));
    println!("disk");
    let most = if what == "ends" { 8 } else { u64::MAX };
    for number in 1..=most {
        let mut sector = [0; 512];
        sector[..8].copy_from_slice(&number.to_le_bytes());
        disk.ask(1, number % SECTORS, Some(&sector));
        disk.ask(4, 0, None);
        println!("{number}");
    }
}

/// A terminal: its two ends.
fn terminal() -> (OwnedFd, OwnedFd) {
    let main = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&main).unwrap();
    unlockpt(&main).unwrap();
    let name = ptsname(&main, Vec::new()).unwrap();
    let mut options = fs::OpenOptions::new();
    let end = options.read(true).write(true).open(name.to_str().unwrap());
    (main, end.unwrap().into())
}

/// A process to be killed, or one that `ends` by itself.
fn start(folder: &Path, terminal: &OwnedFd, what: &str, tap: bool) -> Child {
    let mut command = Command::new(env::current_exe().unwrap());
    if tap {
        command.env("GRANULE_TEST_TAP", "yes");
    }
    command
        .args(["--exact", "whatever_it_is_killed_at_the_next_one_works"])
        .args(["--nocapture", "--test-threads=1"])
        .env(VICTIM, what)
        .env("GRANULE_TEST_FOLDER", folder)
        .stdin(Stdio::from(terminal.try_clone().unwrap()))
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

#[test]
fn whatever_it_is_killed_at_the_next_one_works() {
    if let Ok(what) = env::var(VICTIM) {
        let folder = env::var_os("GRANULE_TEST_FOLDER").unwrap();
        return be_killed(Path::new(&folder), &what);
    }
    let folder = tempfile::tempdir().unwrap();
    let disk = folder.path().join("disk");
    fs::write(&disk, vec![0; BYTES]).unwrap();
    let tap = Tap::open(TAP).map(drop);
    if let Err(error) = &tap {
        granule_types::testing::skip(format_args!("the part with a tap: {error}"));
    }
    let (_main, end) = terminal();
    let mut random = 1u64;
    let (mut acknowledged, mut at_work) = (0u64, 0);

    for kill in 0..KILLS {
        fs::write(&disk, vec![0; BYTES]).unwrap();
        let mut child = start(folder.path(), &end, "is killed", tap.is_ok());
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let mut said = BufReader::new(child.stdout.take().unwrap());
        // Half of them while they start, half while they write.
        if kill % 2 == 1 {
            let until = Instant::now() + Duration::from_secs(60);
            let mut line = String::new();
            while line.trim() != "1" {
                line.clear();
                let count = said.read_line(&mut line).unwrap();
                assert!(count > 0 && Instant::now() < until, "{}", why(&mut child));
            }
        }
        thread::sleep(Duration::from_micros(random % 20_000));
        child.kill().unwrap();
        let status = child.wait().unwrap();
        let mut rest = String::new();
        said.read_to_string(&mut rest).unwrap();

        // It must not have ended by itself: what the one before left would have been in its way.
        assert_eq!(status.code(), None, "kill {kill}: {}", why(&mut child));
        // A line may be cut off.
        let whole = rest.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let mut last = whole.lines().rev().map(str::parse::<u64>);
        let last = last.find_map(Result::ok).unwrap_or(kill % 2);
        let bytes = fs::read(&disk).unwrap();
        let (sectors, _) = bytes.as_chunks::<512>();
        let found = |number: u64| {
            let sector = sectors[usize::try_from(number % SECTORS).unwrap()];
            u64::from_le_bytes(*sector.first_chunk().unwrap())
        };
        for number in last.saturating_sub(SECTORS - 2).max(1)..=last {
            let there = found(number);
            assert!(there >= number, "kill {kill}: {number} is lost");
        }
        acknowledged += last;
        at_work += u64::from(last > 0);
    }

    // The last ones left the terminal raw. One that ends leaves it as people can use it.
    let found = tcgetattr(&end).unwrap().local_modes;
    let ends = start(folder.path(), &end, "ends", tap.is_ok());
    let output = ends.wait_with_output().unwrap();
    let left = tcgetattr(&end).unwrap().local_modes;
    assert!(output.status.success(), "{output:?}");
    assert!(!found.contains(LocalModes::ICANON));
    assert!(left.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG));
    assert!(at_work >= KILLS / 2, "{at_work}");
    println!("{KILLS} kills, {at_work} of them at work, {acknowledged} writes acknowledged");
}

/// What it said on its way out.
fn why(child: &mut Child) -> String {
    let _ = child.kill();
    let mut said = String::new();
    if let Some(stderr) = &mut child.stderr {
        let _ = stderr.read_to_string(&mut said);
    }
    said
}
