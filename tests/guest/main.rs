// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tests of `granule run` with Debian's stock kernel and userland, on an emulated arm64 host with
//! the same kernel. They use the guest's console as a user would.
//!
//! They take minutes and require an arm64 `granule` and the output of `scripts/guest`, so they run
//! on request:
//!
//! ```text
//! scripts/guest
//! cargo build --release --package granule --target aarch64-unknown-linux-musl
//! cargo test --package granule --test guest -- --ignored --nocapture --test-threads=1
//! ```

#![allow(clippy::unwrap_used, reason = "a panic names the line of a failed test")]

mod console;
mod host;
mod kill;
mod lpi;
mod reset;
mod snapshot;
mod snapshot_stress;
mod vsock;

use host::{EmulatedHost, parse_number};

const GUEST_OPTIONS: &str = "--kernel /mnt/vmlinuz --initrd /mnt/initrd.img";

/// Logs in and turns off echo and prompt.
fn log_in(host: &mut EmulatedHost) {
    host.console.expect("login: ");
    host.console.send("root");
    host.console.expect("# ");
    host.console.send("stty -echo; bind 'set enable-bracketed-paste off' 2>/dev/null; PS1=");
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn a_debian_guest_keeps_its_disk_across_a_reboot_and_pings_the_host() {
    let mut host = EmulatedHost::boot();
    host.run("ip tuntap add dev tap0 mode tap vnet_hdr");
    host.run("ip addr add 192.168.77.1/24 dev tap0 && ip link set tap0 up");
    host.console.send(&format!(
        "/mnt/granule run {GUEST_OPTIONS} --disk /dev/guest --net tap=tap0 --memory 512M \
         --cmdline 'console=ttyS0 root=/dev/vda rw'; echo status=$?="
    ));

    log_in(&mut host);
    host.run("mount -o remount,rw / && echo kept over a reboot >/kept && sync");
    let card = "card=$(ls /sys/class/net | grep -v lo)";
    host.run(&format!("{card}; ip addr add 192.168.77.2/24 dev $card && ip link set $card up"));
    let pings = host.run("ping -c 3 -W 20 192.168.77.1");
    assert!(pings.contains("3 received"), "{pings}");
    let bulk = host.run("ping -c 2 -W 20 -s 20000 192.168.77.1");
    assert!(bulk.contains("2 received"), "{bulk}");
    host.console.send("reboot -f");

    log_in(&mut host);
    assert!(host.run("cat /kept").contains("kept over a reboot"));
    host.console.send("poweroff -f");
    host.console.expect("status=0=");
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn the_launch_command_of_the_readme_works_as_written() {
    let readme = include_str!("../../README.md");
    let start = readme.find("target/release/granule run").unwrap();
    let command = readme[start..].split("\n```").next().unwrap();
    // With a CPU for each vCPU, the emulator keeps its translations when vCPUs take turns.
    let mut host = EmulatedHost::boot_with_cpus(4);
    host.run(
        "cd /tmp && guest=/mnt && ln -s /dev/guest my.img && \
         mkdir -p target/release && ln -s /mnt/granule target/release/",
    );
    host.console.send(&format!("{command}; echo status=$?="));

    log_in(&mut host);
    let output = host.run("echo cpus=$(nproc).");
    assert!(output.contains("cpus=4."), "{output}");
    host.console.send("poweroff");
    host.console.expect("status=0=");
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn the_process_uses_at_most_five_mebibytes_in_addition_to_guest_memory() {
    let mut host = EmulatedHost::boot();
    host.run(
        "ip tuntap add dev tap0 mode tap vnet_hdr; ip link set tap0 up; \
         (sleep 3000 | /mnt/granule run --kernel /mnt/vmlinuz --initrd /mnt/initrd.img \
         --disk /dev/guest --net tap=tap0 --memory 128M \
         --cmdline 'console=ttyS0 root=/dev/vda break=bottom cma=0' >/tmp/out 2>&1) &",
    );
    host.run(
        "until grep -q '(initramfs)' /tmp/out; do \
         sleep 5; tail -n 1 /tmp/out; echo; pidof granule >/dev/null || exit; done",
    );

    // The command sums all resident memory except the mapping of guest memory, found by its size.
    let output = host.run(
        "awk '/^[0-9a-f]+-/ { name = $6 } /^Size:/ { size = $2 } \
         /^Rss:/ { if (size != 131072) { sum += $2; if ($2 > 0) print $2, size, name } \
         else guest = $2 } END { print \"guest=\" guest \" others=\" sum \".\" }' \
         /proc/$(pidof granule)/smaps",
    );

    assert!(parse_number(&output, "guest") > 10 << 10, "the guest did not run: {output}");
    assert!(parse_number(&output, "others") <= 5 << 10, "{output}");
}
