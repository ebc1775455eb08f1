// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A snapshot of a guest with a pending LPI: KVM writes the tables of the ITS and the pending interrupts to
//! guest memory, and reads them when the guest is restored, from memory that is there or not yet.

use std::{fs, path::Path, process::Command};

use super::host::EmulatedHost;

/// Functions of the host's shell. `start OPTIONS` runs `lpi.c` until its LPI is pending, and pauses it;
/// `restore VALUE` runs it to its end.
const SHELL_FUNCTIONS: &str = r#"
prepare() { mkdir -p /tmp/run && chmod 777 /tmp/run; }
start() {
    mkdir /tmp/run/saved && chmod 777 /tmp/run/saved
    run_with_socket --kernel /tmp/lpi --cmdline '' --snapshot "/tmp/run/saved$1"
    until grep -q pending /tmp/out; do kill -0 $pid || break; sleep 0.1; done
    request 'POST /v1/pause'
}
stop() { request 'POST /v1/stop' >/dev/null; wait $pid; cat /tmp/out; }
restore() { run_with_socket --restore "/tmp/run/saved$1"; wait $pid; echo "status=$?"; cat /tmp/out; }
"#;

/// Returns the image of `guest-tests/lab/examples/lpi.c`.
fn build_image() -> Vec<u8> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("guest-tests/lab/examples/lpi.c");
    let folder = tempfile::tempdir().unwrap();
    let options = "-Wall -Werror -O2 -ffreestanding -fno-toplevel-reorder \
                   -fno-asynchronous-unwind-tables -fno-pic -mgeneral-regs-only -mstrict-align \
                   -nostdlib -static -Wl,-Ttext=0,-e,run,--build-id=none -o lpi";
    let commands: [(&str, Vec<&str>); 2] = [
        ("aarch64-linux-gnu-gcc", options.split_whitespace().chain(source.to_str()).collect()),
        ("aarch64-linux-gnu-objcopy", vec!["-O", "binary", "lpi", "Image"]),
    ];
    for (program, arguments) in commands {
        let status = Command::new(program).args(arguments).current_dir(&folder).status();
        assert!(status.expect("scripts/setup installs the compiler").success());
    }
    fs::read(folder.path().join("Image")).unwrap()
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn a_restored_guest_receives_its_pending_lpi() {
    let mut host = EmulatedHost::boot();
    host.prepare_guest(SHELL_FUNCTIONS);
    host.run(": >/tmp/lpi");
    for bytes in build_image().chunks(256) {
        let octal: String = bytes.iter().map(|byte| format!("\\{byte:03o}")).collect();
        host.run(&format!("printf '{octal}' >>/tmp/lpi"));
    }
    for options in ["", ",incremental=on"] {
        let saved = host.run(&format!("start {options}; request_snapshot; request_snapshot; stop"));
        assert_eq!(saved.matches("data_bytes").count(), 2, "{saved}");
        assert!(saved.contains("pending: 08192") && !saved.contains("received"), "{saved}");
        for mode in ["", ",memory=map", ",memory=userfaultfd"] {
            let output = host.run(&format!("restore {mode}"));

            assert!(output.contains("status=0"), "{options}{mode}: {output}");
            for line in ["received: 08192", "then: 01023", "again: 08192"] {
                assert!(output.contains(line), "{line}: {options}{mode}: {output}");
            }
        }
        host.run("rm -r /tmp/run/saved");
    }
}
