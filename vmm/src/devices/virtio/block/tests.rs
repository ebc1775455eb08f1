// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
use std::{fs, os::unix::fs::MetadataExt as _};

use proptest::prelude::*;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use tempfile::TempDir;

use super::*;
use crate::devices::virtio::testing::{Buffer, Driver, EVENT_IDX, child_test_command, wait_until};

const SECTORS: usize = 256;
const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPPORTED: u8 = 2;

fn open_disk(folder: &TempDir, is_read_only: bool) -> Box<Block> {
    let path = folder.path().join("disk");
    let bytes: Vec<u8> = (0..=u8::MAX).flat_map(|sector| [sector; 512]).collect();
    fs::write(&path, bytes).unwrap();
    Box::new(Block::new(Disk::open(&path, is_read_only).unwrap(), "a disk of the tests"))
}

/// Returns the temporary directory of a disk, and the disk's driver.
fn start_driver(is_read_only: bool) -> (TempDir, Driver) {
    let folder = tempfile::tempdir().unwrap();
    let driver = Driver::start(open_disk(&folder, is_read_only), EVENT_IDX);
    (folder, driver)
}

fn disk_content(folder: &TempDir) -> Vec<u8> {
    fs::read(folder.path().join("disk")).unwrap()
}

fn read_sectors(driver: &mut Driver, sector: u64, length: u32) -> (Vec<u8>, u8) {
    let request =
        [Buffer::block_header(VIRTIO_BLK_T_IN, sector), Buffer::In(length), Buffer::In(1)];
    let (answers, _) = driver.request(0, &request);
    (answers[0].clone(), answers[1][0])
}

fn write_sectors(driver: &mut Driver, sector: u64, bytes: Vec<u8>) -> u8 {
    let request =
        [Buffer::block_header(VIRTIO_BLK_T_OUT, sector), Buffer::Out(bytes), Buffer::In(1)];
    driver.request(0, &request).0[0][0]
}

fn clear_range(driver: &mut Driver, kind: u32, sector: u64, sectors: u32, flags: u32) -> u8 {
    let mut range = sector.to_le_bytes().to_vec();
    range.extend(sectors.to_le_bytes());
    range.extend(flags.to_le_bytes());
    let request = [Buffer::block_header(kind, 0), Buffer::Out(range), Buffer::In(1)];
    driver.request(0, &request).0[0][0]
}

#[test]
fn a_flush_that_failed_without_the_guest_fails_the_next_one_of_the_guest() {
    let folder = tempfile::tempdir().unwrap();
    let mut disk = open_disk(&folder, false);
    let same = disk.disk.try_clone().unwrap();
    // A pipe cannot be flushed.
    let (_reader, pipe) = io::pipe().unwrap();
    let file = std::mem::replace(&mut disk.disk.file, std::os::fd::OwnedFd::from(pipe).into());
    assert!(disk.disk.flush_for_snapshot().is_err());
    disk.disk.file = file;
    assert!(same.flush_for_snapshot().is_err(), "until the guest has seen the error");
    let mut driver = Driver::start(disk, EVENT_IDX);

    let request = [Buffer::block_header(VIRTIO_BLK_T_FLUSH, 0), Buffer::In(1)];
    let statuses = [0, 1].map(|_| driver.request(0, &request).0[0][0]);

    assert_eq!(statuses, [IOERR, OK]);
}

#[test]
fn a_request_may_span_buffers_of_any_length() {
    let (_folder, mut driver) = start_driver(false);
    let Buffer::Out(head) = Buffer::block_header(VIRTIO_BLK_T_IN, 1) else { unreachable!() };
    let (first, second) = head.split_at(5);

    let (answers, written) = driver.request(
        0,
        &[
            Buffer::Out(first.to_vec()),
            Buffer::Out(second.to_vec()),
            Buffer::In(500),
            Buffer::In(24),
            Buffer::In(501),
        ],
    );

    assert_eq!(written, 1025);
    assert_eq!(answers[0], [1; 500]);
    assert_eq!(answers[1][..12], [1; 12]);
    assert_eq!(answers[1][12..], [2; 12]);
    assert_eq!(answers[2][..500], [2; 500]);
    assert_eq!(answers[2][500], OK);
}

#[test]
fn requests_beyond_the_disk_or_its_limits_fail() {
    let (folder, mut driver) = start_driver(false);
    let end = SECTORS as u64;

    let results = [
        read_sectors(&mut driver, end, 512).1,
        read_sectors(&mut driver, end - 1, 1024).1,
        read_sectors(&mut driver, u64::MAX, 512).1,
        read_sectors(&mut driver, u64::MAX / 512, 1024).1,
        read_sectors(&mut driver, 0, 100).1,
        write_sectors(&mut driver, end, vec![0; 512]),
        write_sectors(&mut driver, 0, vec![0; 100]),
        clear_range(&mut driver, VIRTIO_BLK_T_DISCARD, end, 1, 0),
        clear_range(&mut driver, VIRTIO_BLK_T_WRITE_ZEROES, 0, MAX_DISCARD_SECTORS + 1, 0),
    ];

    assert_eq!(results, [IOERR; 9]);
    assert_eq!(disk_content(&folder).len(), SECTORS * 512);
}

#[test]
fn ranges_are_zeroed_and_discarded() {
    let (folder, mut driver) = start_driver(false);
    let blocks = || fs::metadata(folder.path().join("disk")).unwrap().blocks();
    let before = blocks();

    let zeroed = clear_range(&mut driver, VIRTIO_BLK_T_WRITE_ZEROES, 1, 2, 0);
    let discarded = clear_range(&mut driver, VIRTIO_BLK_T_DISCARD, 128, 128, 0);
    let with_unmap_flag = clear_range(&mut driver, VIRTIO_BLK_T_DISCARD, 8, 8, 1);

    let content = disk_content(&folder);
    assert_eq!((zeroed, with_unmap_flag), (OK, UNSUPPORTED));
    assert_eq!(content[..2048], [vec![0; 512], vec![0; 1024], vec![3; 512]].concat());
    match discarded {
        OK => assert!(blocks() < before),
        status => assert_eq!(status, UNSUPPORTED, "this file system does not support holes"),
    }
}

#[test]
fn capacity_and_serial_number_are_reported() {
    let (_folder, mut driver) = start_driver(false);

    let id = driver
        .request(0, &[Buffer::block_header(VIRTIO_BLK_T_GET_ID, 0), Buffer::In(20), Buffer::In(1)]);
    let unknown = driver.request(0, &[Buffer::block_header(99, 0), Buffer::In(1)]);

    assert_eq!(driver.read_register(0x100), 256);
    assert_eq!(id, (vec![b"a disk of the tests\0".to_vec(), vec![OK]], 21));
    assert_eq!(unknown.0, [[UNSUPPORTED]]);
}

#[test]
fn writes_to_a_read_only_disk_fail() {
    let (folder, mut driver) = start_driver(true);
    let before = disk_content(&folder);

    let results = [
        write_sectors(&mut driver, 0, vec![9; 512]),
        clear_range(&mut driver, VIRTIO_BLK_T_WRITE_ZEROES, 0, 1, 0),
        read_sectors(&mut driver, 3, 512).1,
    ];

    assert_ne!(driver.offered_features() & feature_bit(VIRTIO_BLK_F_RO), 0);
    assert_eq!(results, [IOERR, IOERR, OK]);
    assert_eq!(disk_content(&folder), before);
}

#[test]
fn requests_beyond_a_truncated_file_fail() {
    let (folder, mut driver) = start_driver(false);
    let file = fs::OpenOptions::new().write(true).open(folder.path().join("disk")).unwrap();
    file.set_len(1024).unwrap();

    assert_eq!(read_sectors(&mut driver, 1, 1024).1, IOERR);
    assert_eq!(read_sectors(&mut driver, 1, 512), (vec![1; 512], OK));
}

#[test]
fn a_request_without_space_for_its_status_stops_the_device() {
    let (_folder, mut driver) = start_driver(false);

    driver.add_request(0, &[Buffer::block_header(VIRTIO_BLK_T_FLUSH, 0)]);
    driver.notify(0);
    driver.wait_needs_reset();

    driver.activate(0);
    assert_eq!(read_sectors(&mut driver, 1, 512).1, OK);
}

#[test]
fn a_disk_has_one_writer_or_several_readers() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let writer = open_disk(&folder, false);

    let second = Disk::open(&path, false).unwrap_err();
    let reader = Disk::open(&path, true).unwrap_err();
    drop(writer);
    // A program that another test starts shares the lock until it executes.
    wait_until("the lock of the writer ends", || Disk::open(&path, true).is_ok());
    let readers = [Disk::open(&path, true), Disk::open(&path, true)];
    let writer_beside_readers = Disk::open(&path, false).unwrap_err();

    assert!(readers.iter().all(Result::is_ok));
    for error in [second, reader, writer_beside_readers] {
        assert!(error.to_string().contains("in use by another guest"), "{error}");
    }
}

#[test]
fn files_that_are_not_disks_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty");
    fs::write(&empty, [0; 511]).unwrap();

    let missing = Disk::open(&folder.path().join("missing"), false).unwrap_err();
    let directory = Disk::open(folder.path(), true).unwrap_err();
    let pipe = folder.path().join("pipe");
    mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR, 0).unwrap();
    let pipe = Disk::open(&pipe, true).unwrap_err();

    for error in [missing, pipe] {
        assert!(error.to_string().contains("cannot be opened"), "{error}");
    }
    for error in [directory, Disk::open(&empty, false).unwrap_err()] {
        assert!(error.to_string().contains("less than 512 bytes"), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn a_disk_behaves_as_an_array_of_sectors(
        operations in prop::collection::vec((0..4_u8, 0..280_u64, 1..9_u32, any::<u8>()), 1..30),
    ) {
        let (folder, mut driver) = start_driver(false);
        let mut model = disk_content(&folder);
        for (kind, sector, count, byte) in operations {
            let (first, length) = (usize::try_from(sector).unwrap() * 512, count as usize * 512);
            let target = model.get_mut(first..first + length);
            let expected = if target.is_some() || kind == 3 { OK } else { IOERR };
            let status = match kind {
                0 => {
                    let (bytes, status) = read_sectors(&mut driver, sector, count * 512);
                    if let Some(target) = target {
                        prop_assert_eq!(&bytes[..], target);
                    }
                    status
                }
                1 => {
                    let data: Vec<u8> = (byte..=u8::MAX).cycle().take(length).collect();
                    if let Some(target) = target {
                        target.copy_from_slice(&data);
                    }
                    write_sectors(&mut driver, sector, data)
                }
                2 => {
                    if let Some(target) = target {
                        target.fill(0);
                    }
                    let flags = u32::from(byte & 1);
                    clear_range(&mut driver, VIRTIO_BLK_T_WRITE_ZEROES, sector, count, flags)
                }
                _ => {
                    let request = [Buffer::block_header(VIRTIO_BLK_T_FLUSH, 0), Buffer::In(1)];
                    let (answers, written) = driver.request(0, &request);
                    prop_assert_eq!(written, 1);
                    answers[0][0]
                }
            };
            prop_assert_eq!(status, expected);
        }
        prop_assert_eq!(disk_content(&folder), model);
    }
}

/// Runs in a process with a mount namespace and a file system of 64 KiB, which is smaller than the
/// disk.
#[test]
fn writes_fail_while_the_storage_of_the_host_is_full() {
    const FULL_DISK_VARIABLE: &str = "GRANULE_TEST_FULL";
    if let Some(folder) = std::env::var_os(FULL_DISK_VARIABLE) {
        env_logger::builder().target(env_logger::Target::Stdout).init();
        let path = std::path::PathBuf::from(folder).join("disk");
        fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let disk = Disk::open(&path, false).unwrap();
        let mut driver = Driver::start(Box::new(Block::new(disk, "full")), EVENT_IDX);

        let small = write_sectors(&mut driver, 0, vec![1; 16384]);
        let large = write_sectors(&mut driver, 128, vec![2; 1 << 17]);
        let read_back = read_sectors(&mut driver, 0, 16384);
        // Makes the disk sparse again, with the same size.
        for length in [0, 1 << 20] {
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(length).unwrap();
        }
        let after = write_sectors(&mut driver, 128, vec![3; 16384]);

        assert_eq!((small, large, after), (OK, IOERR, OK));
        assert_eq!(read_back, (vec![1; 16384], OK));
        println!("\nCHECKED");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let child = child_test_command(concat!(
        "devices::virtio::block::tests::",
        "writes_fail_while_the_storage_of_the_host_is_full"
    ));
    let mount = "mount -t tmpfs -o size=64k tmpfs \"$GRANULE_TEST_FULL\" || exit 9";
    let output = std::process::Command::new("unshare")
        .args(["--map-root-user", "--mount", "sh", "-c", &format!("{mount}; exec \"$0\" \"$@\"")])
        .arg(child.get_program())
        .args(child.get_args())
        .env(FULL_DISK_VARIABLE, folder.path())
        .env("RUST_LOG", "warn")
        .output();
    let printed = match &output {
        Ok(output) => String::from_utf8_lossy(&output.stdout).into_owned(),
        Err(_) => String::new(),
    };
    if !output.is_ok_and(|output| output.status.success() || !printed.is_empty()) {
        return granule_types::testing::skip("cannot mount a file system in a user namespace");
    }

    assert!(printed.contains("CHECKED"), "{printed}");
    let warnings: Vec<&str> = printed.lines().filter(|line| line.contains("WARN")).collect();
    let [warning] = warnings[..] else {
        panic!("{printed}");
    };
    assert!(warning.contains("make room"), "{warning}");
}
