// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Holds a CPU of the emulated host at a function while the others run, to make a race occur.
//!
//! QEMU's GDB stub stops the host at three functions in turn: AFTER, from which on the hold applies;
//! FUNCTION, whose first caller is held; UNTIL, whose caller releases it. After the second stop, only
//! the other CPUs resume. A held CPU takes no interrupts, so FUNCTION has to be called with
//! interrupts enabled and without a lock that the others need. The client speaks GDB's remote serial
//! protocol over a Unix socket (GDB manual, appendix E).

use std::{
    fmt,
    io::{self, BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::PathBuf,
    str::FromStr,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tempfile::TempDir;
use thiserror::Error;

/// Time between two attempts to connect to an emulator that starts.
const CONNECT_INTERVAL: Duration = Duration::from_millis(5);

/// Functions of a hold, as `AFTER:FUNCTION:UNTIL`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Hold {
    after: String,
    function: String,
    until: String,
}

impl FromStr for Hold {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names: Vec<_> = text.split(':').map(str::to_owned).collect();
        match <[String; 3]>::try_from(names) {
            Ok(names) if names.iter().all(|name| !name.is_empty()) => {
                let [after, function, until] = names;
                Ok(Self { after, function, until })
            }
            _ => Err("expected three functions of the kernel, AFTER:FUNCTION:UNTIL".to_owned()),
        }
    }
}

crate::values::serialize_as_on_the_command_line!(Hold);

impl fmt::Display for Hold {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.after, self.function, self.until)
    }
}

#[derive(Debug, Error)]
pub enum HoldError {
    #[error("--hold: the kernel has no function '{0}', or the compiler has inlined it")]
    UnknownFunction(String),
    #[error("--hold: no CPU called '{0}' before the host ended")]
    NotCalled(String),
    #[error("--hold: QEMU's GDB stub answered '{0}'")]
    Refused(String),
    #[error("--hold: cannot use QEMU's GDB stub")]
    Stub(#[from] io::Error),
}

impl Hold {
    /// Returns a hold at the addresses that `address_of` returns for functions of a kernel.
    ///
    /// # Errors
    /// The kernel lacks a function.
    pub fn resolve(
        &self,
        address_of: impl Fn(&str) -> Option<u64>,
    ) -> Result<ResolvedHold, HoldError> {
        let resolve = |name: &String| match address_of(name) {
            Some(address) => Ok((name.clone(), address)),
            None => Err(HoldError::UnknownFunction(name.clone())),
        };
        Ok(ResolvedHold {
            after: resolve(&self.after)?,
            function: resolve(&self.function)?,
            until: resolve(&self.until)?,
        })
    }
}

/// The socket of QEMU's GDB stub, in a temporary directory: the path of a job's directory may exceed
/// the length of a socket's address.
#[derive(Debug)]
pub struct GdbSocket {
    /// The directory, which is removed when the socket is dropped; `None` in a dry run.
    _directory: Option<TempDir>,
    path: PathBuf,
}

impl GdbSocket {
    /// Returns a socket that QEMU creates.
    ///
    /// # Errors
    /// The directory cannot be created.
    pub fn new(is_dry_run: bool) -> io::Result<Self> {
        let directory = if is_dry_run { None } else { Some(tempfile::tempdir()?) };
        let path = directory.as_ref().map_or_else(PathBuf::new, |made| made.path().to_owned());
        Ok(Self { _directory: directory, path: path.join("gdb.socket") })
    }

    /// Returns the arguments of an emulator that waits for a client.
    pub fn emulator_arguments(&self) -> [String; 5] {
        let path = self.path.to_string_lossy().replace(',', ",,");
        let socket = format!("socket,id=gdb,server=on,wait=off,path={path}");
        ["-S".into(), "-chardev".into(), socket, "-gdb".into(), "chardev:gdb".into()]
    }
}

/// A hold in a kernel: the name and the address of each function.
#[derive(Debug)]
pub struct ResolvedHold {
    after: (String, u64),
    function: (String, u64),
    until: (String, u64),
}

impl ResolvedHold {
    /// Runs an emulator by `run`, and holds a CPU. The emulator waits for the client at the socket.
    pub fn run<T>(
        &self,
        socket: &GdbSocket,
        run: impl FnOnce() -> T,
    ) -> (T, Result<(), HoldError>) {
        let has_ended = AtomicBool::new(false);
        thread::scope(|scope| {
            let client = scope.spawn(|| self.control(socket, &has_ended));
            let result = run();
            has_ended.store(true, Relaxed);
            let held = client.join();
            (result, held.unwrap_or_else(|_| Err(io::Error::other("the client failed").into())))
        })
    }

    /// Controls an emulator until it ends. After an error, terminates the emulator.
    fn control(&self, socket: &GdbSocket, has_ended: &AtomicBool) -> Result<(), HoldError> {
        let stream = loop {
            match UnixStream::connect(&socket.path) {
                Err(_) if !has_ended.load(Relaxed) => thread::sleep(CONNECT_INTERVAL),
                result => break result?,
            }
        };
        let mut stub = GdbStub::new(stream)?;
        let held = self.hold(&mut stub);
        match held {
            Ok(()) => stub.wait_for_end(),
            // QEMU terminates without an answer.
            Err(_) => stub.send("k").unwrap_or_default(),
        }
        held
    }

    fn hold(&self, stub: &mut GdbStub) -> Result<(), HoldError> {
        let cpus = stub.start()?;
        stub.run_to(&self.after, "vCont;c")?;
        let held = stub.run_to(&self.function, "vCont;c")?;
        let others: String =
            cpus.iter().filter(|cpu| **cpu != held).map(|cpu| format!(";c:{cpu}")).collect();
        stub.run_to(&self.until, &format!("vCont{others}"))?;
        Ok(stub.send("vCont;c")?)
    }
}

/// Connection to QEMU's GDB stub, which names each CPU as a thread.
struct GdbStub {
    stream: UnixStream,
    reader: BufReader<UnixStream>,
}

impl GdbStub {
    fn new(stream: UnixStream) -> io::Result<Self> {
        Ok(Self { reader: BufReader::new(stream.try_clone()?), stream })
    }

    fn send(&mut self, packet: &str) -> io::Result<()> {
        let sum = packet.bytes().fold(0_u8, u8::wrapping_add);
        // One write: the other side may end once it has read the '#'.
        self.stream.write_all(format!("${packet}#{sum:02x}").as_bytes())
    }

    /// Returns the next packet of the stub; `None` after its end.
    fn receive(&mut self) -> io::Result<Option<String>> {
        let mut packet = Vec::new();
        self.reader.skip_until(b'$')?;
        if self.reader.read_until(b'#', &mut packet)? == 0 {
            return Ok(None);
        }
        packet.pop();
        // Two digits of the checksum follow, which the next call skips: a socket loses no bytes.
        // The other side may have ended after its last packet, which is valid all the same.
        let _ = self.stream.write_all(b"+");
        Ok(Some(String::from_utf8_lossy(&packet).into_owned()))
    }

    fn ask(&mut self, packet: &str) -> io::Result<String> {
        self.send(packet)?;
        self.receive()?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// Begins the session. Returns the threads of the CPUs.
    fn start(&mut self) -> io::Result<Vec<String>> {
        self.ask("qSupported:multiprocess+;vContSupported+")?;
        let mut threads = Vec::new();
        let mut answer = self.ask("qfThreadInfo")?;
        while let Some(names) = answer.strip_prefix('m') {
            threads.extend(names.split(',').map(str::to_owned));
            answer = self.ask("qsThreadInfo")?;
        }
        Ok(threads)
    }

    /// Resumes CPUs until one of them calls a function. Returns its thread.
    fn run_to(
        &mut self,
        (name, address): &(String, u64),
        resume: &str,
    ) -> Result<String, HoldError> {
        // A breakpoint of QEMU's debugger ("hardware"), which changes no memory, of 4 bytes.
        let answer = self.ask(&format!("Z1,{address:x},4"))?;
        if answer != "OK" {
            return Err(HoldError::Refused(answer));
        }
        self.send(resume)?;
        let ended = || HoldError::NotCalled(name.clone());
        let stop = match self.receive() {
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Err(ended()),
            stop => stop?.filter(|stop| !stop.starts_with('W')).ok_or_else(ended)?,
        };
        let Some((_, thread)) = stop.split_once("thread:") else {
            return Err(HoldError::Refused(stop));
        };
        // A CPU that resumes at a breakpoint would stop there again.
        self.ask(&format!("z1,{address:x},4"))?;
        Ok(thread.trim_end_matches(';').to_owned())
    }

    /// Reads packets until the emulator ends.
    fn wait_for_end(&mut self) {
        while let Ok(Some(_)) = self.receive() {}
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn hold() -> Hold {
        "getsid:abort:getpgid".parse().unwrap()
    }

    fn resolved() -> ResolvedHold {
        let addresses = [("getsid", 0x1000), ("abort", 0x2000), ("getpgid", 0x3000)];
        let find = |name: &str| addresses.iter().find(|(known, _)| *known == name);
        hold().resolve(|name| find(name).map(|(_, address)| *address)).unwrap()
    }

    /// Runs a hold against a stub with these answers. Returns the packets that it received.
    fn packets(answers: &[&str]) -> (Vec<String>, Result<(), HoldError>) {
        let socket = GdbSocket::new(false).unwrap();
        let listener = UnixListener::bind(&socket.path).unwrap();
        let serve = || {
            let mut client = GdbStub::new(listener.accept().unwrap().0).unwrap();
            let mut packets = Vec::new();
            for answer in answers {
                packets.extend(client.receive().unwrap());
                client.send(answer).unwrap();
            }
            packets.extend(client.receive().unwrap());
            packets
        };
        resolved().run(&socket, serve)
    }

    const START: [&str; 4] = ["PacketSize=1000", "mp01.01", "mp01.02", "l"];
    const STOPS: [&str; 9] = [
        "OK",
        "T05thread:p01.02;",
        "OK",
        "OK",
        "T05thread:p01.02;",
        "OK",
        "OK",
        "T05thread:p01.01;",
        "OK",
    ];

    #[test]
    fn the_first_caller_of_the_function_is_held_until_another_cpu_calls_the_last_one() {
        let (packets, held) = packets(&[START.as_slice(), &STOPS].concat());

        held.unwrap();
        let resumed: Vec<_> = packets.iter().filter(|packet| packet.starts_with("vCont")).collect();
        assert_eq!(resumed, ["vCont;c", "vCont;c", "vCont;c:p01.01", "vCont;c"]);
        assert_eq!(packets[4], "Z1,1000,4");
        assert_eq!(packets[10], "Z1,3000,4");
    }

    #[test]
    fn a_function_that_is_not_called_is_named() {
        let (packets, held) = packets(&[START.as_slice(), &STOPS[..4], &["W00"]].concat());

        assert_eq!(held.unwrap_err().to_string(), HoldError::NotCalled("abort".into()).to_string());
        assert_eq!(packets.last().map(String::as_str), Some("k"));
    }

    #[test]
    fn an_emulator_that_does_not_start_ends_the_hold() {
        let socket = GdbSocket::new(false).unwrap();

        let ((), held) = resolved().run(&socket, || ());

        assert!(matches!(held, Err(HoldError::Stub(_))));
    }

    #[test]
    fn a_hold_names_three_functions_that_the_kernel_has() {
        assert_eq!(hold().to_string().parse(), Ok(hold()));
        assert!("a:b".parse::<Hold>().unwrap_err().contains("AFTER:FUNCTION:UNTIL"));
        assert!("a::c".parse::<Hold>().is_err());
        let error =
            hold().resolve(|name| (name == "getsid").then_some(0x1000)).unwrap_err().to_string();
        assert!(error.contains("'abort'"), "{error}");
    }
}
