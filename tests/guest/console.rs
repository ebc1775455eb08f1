// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Guest consoles with a stalled reader, on serial ports and on a virtio console. The guest
//! receives input and then writes more than the reader reads; requests still pause, resume and stop
//! the VM. A signal also stops a VM while it is built. The dirty log reports a booting guest's
//! writes by zone, and stalls in faults have the sizes that a probe of the kernel finds.

use super::host::EmulatedHost;

/// Functions of the host's shell. `prepare` builds the guest's initramfs; `run OPTIONS` starts a
/// guest whose reader stalls after nine lines; `request REQUEST` sends a request to the control
/// socket.
const SHELL_FUNCTIONS: &str = r#"
prepare() {
    install_programs /bin/busybox
    modules virtio_mmio virtio_console
    pack <<'INIT'
#!/bin/busybox sh
busybox mount -t devtmpfs dev /dev
busybox mount -t proc proc /proc
for module in /m/*; do busybox insmod $module; done
tty=/dev/$(busybox sed 's/.*console=\([a-zA-Z0-9]*\).*/\1/' /proc/cmdline)
until [ -c $tty ]; do busybox sleep 0.1; done
exec <$tty >$tty 2>&1
echo "$tty is up"
read line
echo "received <$line>"
while :; do echo "more than is read"; done
INIT
}
run() {
    rm -f /tmp/in /tmp/out && : >/tmp/head && mkfifo /tmp/in /tmp/out
    (for line in 1 2 3 4 5 6 7 8 9; do IFS= read -r text; echo "$text" >>/tmp/head; done
        exec tail -f /dev/null) </tmp/out &
    reader=$!
    # A serial port loses input that arrives before its driver.
    (until grep -q 'is up' /tmp/head; do sleep 0.2; done
        echo typed; exec tail -f /dev/null) >/tmp/in &
    typist=$!
    /mnt/granule run --kernel /mnt/vmlinuz --initrd /tmp/small.cpio --api-socket /tmp/vm.sock \
        "$@" </tmp/in >/tmp/out 2>/tmp/err &
    pid=$!
}
wait_until_stalled() {
    until grep -q 'more than' /tmp/head; do kill -0 $pid || break; sleep 2; done
    sleep 20
}
start_dirty_log() {
    until [ -S /tmp/vm.sock ]; do sleep 0.1; done
    request 'POST /v1/dirty/start'
}
request() {
    perl -MIO::Socket::UNIX -e '$s = IO::Socket::UNIX->new("/tmp/vm.sock") or die;
        print $s "$ARGV[0] HTTP/1.1\r\nHost: vm\r\nConnection: close\r\n\r\n"; $s->flush;
        while (<$s>) { print; last if /state/ }
        print "\n"' "$1"
}
stop_guest() {
    begun=$(date +%s)
    kill $pid; wait $pid; echo "status=$? after $(($(date +%s) - begun)) s"
    kill $reader $typist
    cat /tmp/head /tmp/err
    ls /tmp/vm.sock
    true
}"#;

/// Parses the body of a response.
fn json(response: &str) -> serde_json::Value {
    let body = response.find('{').map_or("", |start| &response[start..]);
    serde_json::from_str(body.trim()).unwrap_or_else(|error| panic!("{error}: {response}"))
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn a_stalled_console_reader_does_not_block_requests_and_signals() {
    let mut host = EmulatedHost::boot();
    host.prepare_guest(SHELL_FUNCTIONS);
    host.run("mount -t tracefs tracefs /sys/kernel/tracing");

    for (options, tty) in [
        ("--memory 128M --memory 64M --cmdline 'console=ttyS0 quiet'", "ttyS0"),
        (
            "--memory 128M --cmdline 'console=ttyAMA0 quiet' --serial pl011 --fault-stalls sizes --pin 0",
            "ttyAMA0",
        ),
        ("--memory 128M --cmdline 'console=hvc0 quiet' --console virtio", "hvc0"),
    ] {
        let logging = host.run(&format!("run {options}; start_dirty_log"));
        host.run("wait_until_stalled");
        let dirty = json(&host.run("request 'GET /v1/dirty'"));
        let cleared = json(&host.run("request 'POST /v1/dirty/clear'"));
        let again = json(&host.run("request 'GET /v1/dirty'"));
        let metrics = host.run("request 'GET /metrics'");
        let top = host.run("/mnt/granule top /tmp/vm.sock --count 2 --mapped");
        let counters = json(&host.run("request 'GET /v1/counters'"));
        let paused = host.run("request 'POST /v1/pause'");
        let resumed = host.run("request 'POST /v1/resume'");
        let output = host.run("stop_guest 2>&1");

        assert!(logging.contains("\"dirty_logging\":true"), "{logging}");
        let zones = dirty["zones"].as_array().unwrap();
        let pages = zones.iter().map(|zone| zone["dirty_pages"].as_u64().unwrap());
        let pages: Vec<_> = pages.collect();
        assert_eq!(pages.len(), 1 + usize::from(tty == "ttyS0"), "{dirty}");
        assert!(pages[0] > 1000, "a booting kernel writes its memory: {dirty}");
        assert_eq!(dirty["dirty_pages"], pages.iter().sum::<u64>());
        assert_eq!(cleared["dirty_pages"], 0);
        assert!(again["dirty_pages"].as_u64().unwrap() < pages[0] / 2, "{again}");
        assert!(
            metrics.contains("\ngranule_stall_seconds_bucket{cause=\"mmio\",le=\"+Inf\"} "),
            "{metrics}"
        );
        assert!(metrics.contains("\ngranule_exits_total{reason=\"mmio-writes\"} "), "{metrics}");
        assert!(top.contains("exit mmio-writes"), "{top}");
        // Debian's kernel does not export the tables.
        assert!(top.contains("mapped at stage 2, zone 0: unknown"), "{top}");
        assert!(top.contains("stall dirty-clear: mean "), "{top}");
        for (operation, count) in [("start", 1), ("clear", 1), ("read", 2)] {
            assert_eq!(counters["stalls"][format!("dirty-{operation}.count")], count, "{counters}");
        }
        let measures_faults = options.contains("--fault-stalls");
        let mapped = counters["stalls"]["mapped-4K.count"].as_u64();
        assert_eq!(mapped.is_some_and(|pages| pages > 1000), measures_faults, "{counters}");
        assert!(paused.contains("paused"), "{paused}");
        assert!(resumed.contains("running"), "{resumed}");
        assert!(output.contains("status=0"), "{output}");
        assert!(output.contains(&format!("/dev/{tty} is up")), "{output}");
        assert!(output.contains("received <typed>"), "{output}");
        assert!(output.contains("were not read"), "{output}");
        assert!(output.contains("stopped by SIGTERM"), "{output}");
        assert!(output.contains("cannot access"), "a socket is left: {output}");
    }

    // Clearing 768M takes longer than 0.2 s.
    host.run("run --memory 768M,prefault=on; sleep 0.2");
    let output = host.run("stop_guest 2>&1");
    assert!(output.contains("status=0"), "{output}");
    assert!(output.contains("before the guest ran"), "{output}");
    assert!(output.contains("cannot access"), "a socket is left: {output}");
}
