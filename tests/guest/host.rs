// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The emulated host: Debian's kernel and root file system from `scripts/guest`, a second disk with
//! `granule` and the guest's files, and a third disk for the guest. Its only process is a shell on
//! the console, which a [`Session`] controls. Writes to the disks are discarded.

use std::{
    env, fs,
    io::{Read as _, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{self, Receiver},
    thread,
    time::{Duration, Instant},
};

use granule_lab::expect::UnmatchedOutput;
use tempfile::TempDir;

/// Timeout of an expected text, for nested emulation on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(1200);

/// Init of the host, which replaces Debian's init in the initramfs and uses Debian's tools and
/// modules. The guest's disk is `/dev/guest`; the files are in `/mnt`.
const INIT_SCRIPT: &str = "#!/bin/sh
export PATH=/usr/sbin:/usr/bin:/sbin:/bin
mkdir -p /dev /proc /sys /root
mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
modprobe virtio_mmio
modprobe virtio_blk
modprobe ext4
until [ -b /dev/vdc ]; do sleep 1; done
for disk in vda vdb vdc; do
    ln -s /dev/$disk /dev/$(cat /sys/block/$disk/serial)
done
mount -t ext4 /dev/host /root
mount -t ext4 -o ro /dev/files /root/mnt
for folder in dev proc sys; do mount --move /$folder /root/$folder; done
mount -t tmpfs tmpfs /root/tmp
chroot /root modprobe tun
export TERM=dumb PS1= PS2=
exec chroot /root /bin/sh -c 'stty -echo; echo host is up; exec /bin/sh'
";

/// Functions of the shell that build the initramfs of a guest, in the order of use.
/// `install_programs PROGRAM…` copies programs and their libraries to `/tmp/g`. `modules NAME…`
/// copies modules and their dependencies to `/m`, sorted in load order. `pack` reads `/init` from
/// standard input and builds `/tmp/small.cpio`; `pack_guest_with_disk` reads the rest of an `/init` that
/// waits for its disk. `run_with_socket OPTION…` starts `granule` as process `$pid` with the control
/// socket `/tmp/run/vm.sock` and the output `/tmp/out`, by the command `$nice` if that is set. `request
/// 'METHOD PATH'…` sends requests to the socket, and `request_snapshot REQUEST…` repeats one until the
/// snapshot can be taken, of the kind `$kind` (`/live`) if that is set, and sends the others.
const GUEST_FUNCTIONS: &str = r#"
install_programs() {
    mkdir -p /tmp/g/bin /tmp/g/dev /tmp/g/proc /tmp/g/m && cp "$@" /tmp/g/bin/
    for lib in $(ldd "$@" | grep -o '/lib[^ ]*'); do
        mkdir -p /tmp/g$(dirname $lib) && cp $lib /tmp/g$lib
    done
}
modules() {
    count=10
    for module in $(modprobe -D -a "$@" | sed -n 's/^insmod //p' | awk '!seen[$0]++'); do
        cp $module /tmp/g/m/$count.ko; count=$((count + 1))
    done
}
pack() {
    cat >/tmp/g/init && chmod 755 /tmp/g/init
    (cd /tmp/g && find . | cpio -o -H newc --quiet) >/tmp/small.cpio
}
pack_guest_with_disk() {
    { cat <<'INIT'; cat; } | pack
#!/bin/busybox sh
busybox mount -t devtmpfs dev /dev
busybox mount -t proc proc /proc
for module in /m/*; do busybox insmod $module; done
until [ -b /dev/vda ]; do busybox sleep 0.1; done
exec </dev/ttyS0 >/dev/ttyS0 2>&1
INIT
}
run_with_socket() {
    rm -f /tmp/run/vm.sock && : >/tmp/out # The output of the last run must not count.
    $nice /mnt/granule run --user nobody --api-socket /tmp/run/vm.sock "$@" </dev/null >/tmp/out 2>&1 &
    pid=$!
}
request() {
    perl -MIO::Socket::UNIX -e 'for (@ARGV) {
        $s = IO::Socket::UNIX->new("/tmp/run/vm.sock") or die;
        print $s "$_ HTTP/1.1\r\nHost: vm\r\nConnection: close\r\n\r\n"; $s->flush;
        $answer = join "", <$s>; print "$answer\n";
        last if $answer =~ /try again/
    }' "$@"
}
request_snapshot() {
    # Memory that is filled on demand must be there.
    for attempt in $(seq 30); do
        request "POST /v1/snapshot$kind" "$@" | tee /tmp/answer
        grep -q 'try again' /tmp/answer || break
        sleep 1
    done
}"#;

pub struct EmulatedHost {
    pub console: Session,
    _files: TempDir,
}

impl EmulatedHost {
    /// Boots a host with a GICv3 up to its shell.
    pub fn boot() -> Self {
        Self::boot_with_gic(3)
    }

    /// Boots a host with a GIC of version `version`.
    pub fn boot_with_gic(version: u8) -> Self {
        Self::boot_machine(version, 1, "1536M")
    }

    /// Boots a host with a GICv3 and this memory.
    pub fn boot_with_memory(memory: &str) -> Self {
        Self::boot_machine(3, 1, memory)
    }

    /// Boots a host with a GICv3 and this number of CPUs.
    pub fn boot_with_cpus(count: u8) -> Self {
        Self::boot_machine(3, count, "1536M")
    }

    fn boot_machine(version: u8, cpus: u8, memory: &str) -> Self {
        let guest = guest_directory();
        let files = tempfile::tempdir().unwrap();
        let initrd = build_initrd(&guest, files.path());
        let disk = build_disk(&guest, files.path());
        let root = guest.join("root.img");
        let mut command = Command::new("qemu-system-aarch64");
        for (name, path) in [("host", &root), ("guest", &root), ("files", &disk)] {
            let file = path.display();
            command.args([
                "-drive",
                &format!("if=none,id={name},format=raw,cache=unsafe,snapshot=on,file={file}"),
                "-device",
                &format!("virtio-blk-device,drive={name},serial={name}"),
            ]);
        }
        // Virtual time advances by one nanosecond an instruction and ignores the machine's load.
        command
            .arg("-M")
            .arg(format!("virt,virtualization=on,gic-version={version}"))
            .args(["-cpu", "neoverse-n1"])
            .args(["-icount", "shift=0,sleep=off", "-smp", &cpus.to_string(), "-m", memory])
            .args(["-nic", "none", "-display", "none", "-serial", "stdio"])
            .args(["-monitor", "none", "-no-reboot"])
            .args(["-global", "virtio-mmio.force-legacy=false"])
            .arg("-kernel")
            .arg(guest.join("vmlinuz"))
            .arg("-initrd")
            .arg(initrd)
            .args(["-append", "console=ttyAMA0 panic=-1 quiet"]);
        let mut console = Session::start(&mut command);
        console.expect("host is up");
        Self { console, _files: files }
    }

    /// Runs a command in the shell and returns its output. The command must succeed.
    pub fn run(&mut self, command: &str) -> String {
        self.console.send(&format!("{command}\necho \"<$?>\""));
        let output = self.console.expect("\n<");
        let status = self.console.expect(">");
        assert_eq!(status, "0", "{command}: {output}");
        output
    }

    /// Builds a guest with an initramfs only: defines `functions` in the shell and calls `prepare`,
    /// one of them.
    pub fn prepare_guest(&mut self, functions: &str) {
        for command in [GUEST_FUNCTIONS, functions, "prepare"] {
            self.run(command);
        }
    }
}

/// Running program and its output since the last match.
pub struct Session {
    child: Child,
    input: ChildStdin,
    output: Receiver<Vec<u8>>,
    unmatched_output: UnmatchedOutput,
}

impl Session {
    pub fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the emulator starts");
        let mut stdout = child.stdout.take().unwrap();
        let (sender, output) = mpsc::channel();
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = stdout.read(&mut bytes) {
                print!("{}", String::from_utf8_lossy(&bytes[..count]));
                if sender.send(bytes[..count].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self {
            input: child.stdin.take().unwrap(),
            child,
            output,
            unmatched_output: UnmatchedOutput::default(),
        }
    }

    pub fn send(&mut self, line: &str) {
        writeln!(self.input, "{line}").unwrap();
        self.input.flush().unwrap();
    }

    /// Waits for `text` and returns the output before it.
    pub fn expect(&mut self, text: &str) -> String {
        let until = Instant::now() + TIMEOUT;
        loop {
            if let Some(before) = self.unmatched_output.take_until(text) {
                return String::from_utf8_lossy(&before).into_owned();
            }
            let left = until.saturating_duration_since(Instant::now());
            let mut bytes = self.output.recv_timeout(left).unwrap_or_else(|error| {
                panic!("no '{text}': {error}: {}", self.unmatched_output.to_text());
            });
            bytes.retain(|byte| *byte != b'\r');
            self.unmatched_output.push(&bytes);
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // The program may have exited.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Returns the directory set by `GRANULE_GUEST`, or the output of `scripts/guest`.
fn guest_directory() -> PathBuf {
    if let Some(folder) = env::var_os("GRANULE_GUEST") {
        return PathBuf::from(folder);
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/guest");
    let output = Command::new(script).output().unwrap();
    assert!(output.status.success());
    let folder = String::from_utf8(output.stdout).unwrap();
    PathBuf::from(folder.trim_end())
}

fn arm64_granule() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).to_owned();
    let target = env::var_os("CARGO_TARGET_DIR").map_or(root.join("target"), PathBuf::from);
    let granule = target.join("aarch64-unknown-linux-musl/release/granule");
    assert!(granule.is_file(), "build the arm64 granule first: {}", granule.display());
    granule
}

/// Returns the path of Debian's initramfs with an appended archive that replaces its init.
fn build_initrd(guest: &Path, files: &Path) -> PathBuf {
    let folder = files.join("init");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("init"), INIT_SCRIPT).unwrap();
    fs::set_permissions(folder.join("init"), fs::Permissions::from_mode(0o755)).unwrap();
    let archive = Command::new("sh")
        .args(["-c", "echo init | cpio --create --format=newc --quiet"])
        .current_dir(&folder)
        .output()
        .unwrap();
    assert!(archive.status.success());
    let mut bytes = fs::read(guest.join("initrd.img")).unwrap();
    bytes.resize(bytes.len().next_multiple_of(512), 0);
    bytes.extend(archive.stdout);
    let path = files.join("initrd.img");
    fs::write(&path, bytes).unwrap();
    path
}

/// Returns the path of the disk image with `granule` and the guest's files.
fn build_disk(guest: &Path, files: &Path) -> PathBuf {
    let folder = files.join("disk");
    fs::create_dir(&folder).unwrap();
    for name in ["vmlinuz", "initrd.img"] {
        fs::copy(guest.join(name), folder.join(name)).unwrap();
    }
    fs::copy(arm64_granule(), folder.join("granule")).unwrap();
    let path = files.join("disk.img");
    let status = Command::new("mke2fs")
        .env("PATH", "/usr/sbin:/sbin:/usr/bin:/bin")
        .args(["-q", "-t", "ext4", "-d"])
        .args([&folder, &path])
        .arg("128M")
        .status();
    assert!(status.unwrap().success());
    fs::remove_dir_all(&folder).unwrap();
    path
}

/// Parses the number after `name=`.
pub fn parse_number(output: &str, name: &str) -> u64 {
    let rest = output.split_once(&format!("{name}=")).unwrap().1;
    let digits = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap();
    digits.parse().unwrap()
}
