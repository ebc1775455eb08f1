// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Test of a disk whose storage on the host is full.

use super::*;

/// Runs in a process with a mount namespace and a file system of 64 KiB, which is smaller than the
/// disk.
#[test]
fn writes_fail_while_the_storage_of_the_host_is_full() {
    const FULL: &str = "GRANULE_TEST_FULL";
    if let Some(folder) = std::env::var_os(FULL) {
        log::set_logger(&PrintLogger).unwrap();
        log::set_max_level(log::LevelFilter::Warn);
        let path = std::path::PathBuf::from(folder).join("disk");
        fs::File::create(&path).unwrap().set_len(1 << 20).unwrap();
        let disk = Disk::open(&path, false).unwrap();
        let memory = memory();
        let mut driver = Driver::start(&memory, Box::new(Block::new(disk, "full")), EVENT_IDX);

        let small = write(&mut driver, 0, vec![1; 16384]);
        let large = write(&mut driver, 128, vec![2; 1 << 17]);
        let read_back = read(&mut driver, 0, 16384);
        // Back to a sparse disk of the same size.
        for length in [0, 1 << 20] {
            let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
            file.set_len(length).unwrap();
        }
        let after = write(&mut driver, 128, vec![3; 16384]);

        assert_eq!((small, large, after), (OK, IOERR, OK));
        assert_eq!(read_back, (vec![1; 16384], OK));
        println!("\nCHECKED");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let output = std::process::Command::new("unshare")
        .args(["--map-root-user", "--mount", "sh", "-c"])
        .arg(
            "mount -t tmpfs -o size=64k tmpfs \"$GRANULE_TEST_FULL\" || exit 9; exec \"$0\" \"$@\"",
        )
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", "--test-threads=1"])
        .arg(concat!(
            "devices::virtio::block::tests::full_storage::",
            "writes_fail_while_the_storage_of_the_host_is_full"
        ))
        .env(FULL, folder.path())
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

/// Logger that prints to standard output.
struct PrintLogger;

impl log::Log for PrintLogger {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        println!("\n{} {}", record.level(), record.args());
    }

    fn flush(&self) {}
}
