// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Console input: a thread that forwards bytes from a file descriptor to the guest's console.
//!
//! Input passes a filter, which detects the escape key, and is buffered until the guest reads it.
//! With a terminal, the thread keeps reading even if the guest does not, so that the escape key
//! always works; bytes beyond a limit are dropped. With a file or a pipe, the thread reads again
//! only after the sink has accepted all earlier bytes, so that no byte is lost.
//!
//! The bytes go to the FIFO of a serial port (`SerialSink`) or to a pipe from which a virtio
//! console reads (`PipeSink`).
//!
//! The input ends before the VM. [`StoppedInput::unread`] then returns the bytes that the guest has read
//! from neither, with which the input of the VM after a reset starts.

use std::{
    io::{self, Read as _},
    mem,
    os::fd::AsFd,
    sync::Arc,
};

use parking_lot::Mutex;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};
use vmm_sys_util::eventfd::EventFd;

use super::serial::SerialPort;
use crate::scoped_thread::{ScopedThread, borrow_event};

/// Maximum number of bytes buffered for the guest.
const BACKLOG_CAPACITY: usize = 64 << 10;

/// Policy for input that the guest does not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OverflowPolicy {
    /// Drops further input: for a terminal.
    Drop,
    /// Stops reading: for a file or a pipe.
    Wait,
}

/// Destination of console input.
trait InputSink: Send {
    /// Accepts as many bytes of `input` as fit, and returns their number.
    ///
    /// # Errors
    /// The sink is closed.
    fn accept(&mut self, input: &[u8]) -> io::Result<usize>;

    /// Returns the descriptor that signals space after a short [`InputSink::accept`].
    fn space_event(&self) -> PollFd<'_>;
}

/// Input sink that fills the FIFO of a serial port.
struct SerialSink {
    drain_event: Arc<EventFd>,
    port: Arc<Mutex<dyn SerialPort>>,
}

impl SerialSink {
    fn new(port: Arc<Mutex<dyn SerialPort>>) -> Self {
        let drain_event = port.lock().drain_event();
        Self { drain_event, port }
    }
}

impl InputSink for SerialSink {
    fn accept(&mut self, input: &[u8]) -> io::Result<usize> {
        // A cleared event reports the next drain of the FIFO; the read fails if it is clear.
        let _ = self.drain_event.read();
        Ok(self.port.lock().receive(input))
    }

    fn space_event(&self) -> PollFd<'_> {
        PollFd::from_borrowed_fd(borrow_event(&self.drain_event), PollFlags::IN)
    }
}

/// Input sink that writes to a pipe from which a device reads.
#[derive(Debug)]
pub struct PipeSink(io::PipeWriter);

impl PipeSink {
    /// Creates a pipe; returns the sink and the read end for the device.
    pub fn new() -> io::Result<(Self, io::PipeReader)> {
        let (reader, writer) = io::pipe()?;
        rustix::io::ioctl_fionbio(&writer, true)?;
        Ok((Self(writer), reader))
    }
}

impl InputSink for PipeSink {
    fn accept(&mut self, input: &[u8]) -> io::Result<usize> {
        match rustix::io::write(&self.0, input) {
            Err(Errno::AGAIN | Errno::INTR) => Ok(0),
            other => Ok(other?),
        }
    }

    fn space_event(&self) -> PollFd<'_> {
        PollFd::new(&self.0, PollFlags::OUT)
    }
}

/// Console of the guest that receives the input.
#[allow(missing_debug_implementations, reason = "it holds any port")]
pub enum InputConsole {
    /// A serial port.
    Serial(Arc<Mutex<dyn SerialPort>>),
    /// A virtio console, which reads from the pipe of the sink. It has another descriptor of the read end.
    Virtio(PipeSink, io::PipeReader),
}

/// Place of the bytes that a sink has accepted and the guest has not read.
enum AcceptedInput {
    Fifo(Arc<Mutex<dyn SerialPort>>),
    Pipe(io::PipeReader),
}

impl AcceptedInput {
    /// Returns the bytes. The sink and the device must have ended.
    fn unread(self) -> Vec<u8> {
        let mut unread = Vec::new();
        match self {
            Self::Fifo(port) => unread = port.lock().unread_input(),
            Self::Pipe(mut pipe) => {
                if let Err(error) = pipe.read_to_end(&mut unread) {
                    log::warn!("console input is lost: {error}");
                }
            }
        }
        unread
    }
}

/// Console input of a VM. Dropping it ends the input.
#[allow(missing_debug_implementations, reason = "it holds any port")]
pub struct ConsoleInput {
    thread: ScopedThread,
    accepted: AcceptedInput,
    /// Bytes that the sink has not accepted, when the thread has ended.
    backlog: Arc<Mutex<Vec<u8>>>,
}

impl ConsoleInput {
    /// Starts a thread that forwards the bytes of `earlier`, and `input` through `filter` to its end. The
    /// filter may change and remove bytes, and returns `false` to end the input.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        console: InputConsole,
        earlier: Vec<u8>,
        input: impl AsFd + Send + 'static,
        overflow: OverflowPolicy,
        mut filter: impl FnMut(&mut Vec<u8>) -> bool + Send + 'static,
    ) -> io::Result<Self> {
        let (sink, accepted): (Box<dyn InputSink>, _) = match console {
            InputConsole::Serial(port) => {
                (Box::new(SerialSink::new(Arc::clone(&port))), AcceptedInput::Fifo(port))
            }
            InputConsole::Virtio(sink, reader) => (Box::new(sink), AcceptedInput::Pipe(reader)),
        };
        let backlog = Arc::new(Mutex::new(earlier));
        let of_thread = Arc::clone(&backlog);
        let thread = ScopedThread::start("console-in", move |stop| {
            let mut backlog = mem::take(&mut *of_thread.lock());
            let result = forward(sink, &mut backlog, &input, overflow, &mut filter, stop);
            *of_thread.lock() = backlog;
            if let Err(error) = result {
                log::warn!("console input ends: {error}");
            }
        })?;
        Ok(Self { thread, accepted, backlog })
    }

    /// Ends the input. What the user types from now on stays in the terminal.
    pub fn stop(self) -> StoppedInput {
        drop(self.thread);
        StoppedInput { accepted: self.accepted, backlog: self.backlog }
    }
}

/// Input that has ended, of which the guest may still read what the console has accepted.
#[allow(missing_debug_implementations, reason = "it holds any port")]
pub struct StoppedInput {
    accepted: AcceptedInput,
    backlog: Arc<Mutex<Vec<u8>>>,
}

impl StoppedInput {
    /// Returns the bytes that the guest has not read, oldest first. The VM's vCPUs and devices must have
    /// ended.
    #[must_use]
    pub fn unread(self) -> Vec<u8> {
        let mut unread = self.accepted.unread();
        unread.append(&mut self.backlog.lock());
        unread
    }
}

fn forward(
    mut sink: Box<dyn InputSink>,
    backlog: &mut Vec<u8>,
    input: &impl AsFd,
    overflow: OverflowPolicy,
    filter: &mut impl FnMut(&mut Vec<u8>) -> bool,
    stop: &EventFd,
) -> io::Result<()> {
    let mut bytes = Vec::new();
    let (mut open, mut warned) = (true, false);
    loop {
        if !backlog.is_empty() {
            let accepted = sink.accept(backlog)?;
            backlog.drain(..accepted);
        }
        if !open && backlog.is_empty() {
            return Ok(());
        }
        let reads = open && (overflow == OverflowPolicy::Drop || backlog.is_empty());
        let mut fds = vec![PollFd::from_borrowed_fd(borrow_event(stop), PollFlags::IN)];
        fds.extend((!backlog.is_empty()).then(|| sink.space_event()));
        fds.extend(reads.then(|| PollFd::new(input, PollFlags::IN)));
        rustix::io::retry_on_intr(|| poll(&mut fds, None))?;
        let ready = |fd: Option<&PollFd<'_>>| fd.is_some_and(|fd| !fd.revents().is_empty());
        if ready(fds.first()) {
            return Ok(());
        }
        if reads && ready(fds.last()) {
            open = read_chunk(input, &mut bytes)? && filter(&mut bytes);
            let space = BACKLOG_CAPACITY.saturating_sub(backlog.len());
            if bytes.len() > space {
                bytes.truncate(space);
                if !mem::replace(&mut warned, true) {
                    log::warn!(
                        "the guest does not read its console: input beyond {BACKLOG_CAPACITY} \
                         bytes is dropped"
                    );
                }
            }
            backlog.append(&mut bytes);
        }
    }
}

/// Appends the available bytes to `bytes`. Returns false at the end of the input.
fn read_chunk(input: &impl AsFd, bytes: &mut Vec<u8>) -> io::Result<bool> {
    let mut buffer = [0; 1024];
    match rustix::io::read(input, &mut buffer) {
        Err(Errno::INTR | Errno::AGAIN) => Ok(true),
        Err(error) => Err(error.into()),
        Ok(count) => {
            bytes.extend_from_slice(&buffer[..count]);
            Ok(count > 0)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        sync::mpsc,
        thread,
        time::Duration,
    };

    use super::{
        super::{MmioDevice as _, Serial},
        *,
    };

    /// Returns a serial port with its interrupt, the port as a console, and an input pipe.
    fn setup() -> ((Arc<Mutex<Serial>>, EventFd), InputConsole, io::PipeReader, io::PipeWriter) {
        let irq = EventFd::new(libc::EFD_NONBLOCK).unwrap();
        let port = Serial::new(irq.try_clone().unwrap(), Box::new(io::sink())).unwrap();
        let port = Arc::new(Mutex::new(port));
        let console = InputConsole::Serial(Arc::clone(&port) as _);
        let (input, keyboard) = io::pipe().unwrap();
        ((port, irq), console, input, keyboard)
    }

    /// Reads `count` bytes from the port as a guest driver does.
    fn read_port(port: &Mutex<Serial>, count: usize) -> Vec<u8> {
        let mut bytes = Vec::new();
        while bytes.len() < count {
            let mut port = port.lock();
            let mut data = [0];
            assert!(port.read(5, &mut data));
            if data[0] & 1 == 1 {
                assert!(port.read(0, &mut data));
                bytes.push(data[0]);
            } else {
                drop(port);
                thread::yield_now();
            }
        }
        bytes
    }

    /// Returns the console and the descriptor from which its device reads.
    fn virtio_console() -> (InputConsole, io::PipeReader) {
        let (sink, device) = PipeSink::new().unwrap();
        (InputConsole::Virtio(sink, device.try_clone().unwrap()), device)
    }

    /// Forwards a pipe as it is.
    fn start_waiting(
        console: InputConsole,
        earlier: Vec<u8>,
        input: impl AsFd + Send + 'static,
    ) -> ConsoleInput {
        ConsoleInput::start(console, earlier, input, OverflowPolicy::Wait, |_| true).unwrap()
    }

    fn long_input() -> Vec<u8> {
        (0..251).cycle().take(3 * BACKLOG_CAPACITY).collect()
    }

    #[test]
    fn input_larger_than_the_fifo_arrives_in_order() {
        for overflow in [OverflowPolicy::Drop, OverflowPolicy::Wait] {
            let ((port, irq), console, input, mut keyboard) = setup();
            assert!(port.lock().write(1, &[1]));
            let running = ConsoleInput::start(console, Vec::new(), input, overflow, |bytes| {
                bytes.retain(|byte| *byte != 100);
                true
            });

            let typed: Vec<u8> = (0..200).collect();
            keyboard.write_all(&typed).unwrap();
            drop(keyboard);
            let received = read_port(&port, 199);

            assert!(received.into_iter().eq((0..200).filter(|byte| *byte != 100)));
            assert!(irq.read().unwrap() > 0);
            drop(running.unwrap());
        }
    }

    #[test]
    fn no_byte_of_a_long_file_is_lost() {
        let ((port, _irq), console, input, mut keyboard) = setup();
        let _running = start_waiting(console, Vec::new(), input);
        let writer = thread::spawn(move || keyboard.write_all(&long_input()).unwrap());

        let received = read_port(&port, long_input().len());

        writer.join().unwrap();
        assert!(received == long_input());
    }

    #[test]
    fn the_filter_receives_input_that_the_guest_does_not_read() {
        let (_port, console, input, mut keyboard) = setup();
        let (sender, found) = mpsc::channel();
        let filter = move |bytes: &mut Vec<u8>| {
            let is_end = bytes.contains(&1);
            sender.send(is_end).unwrap();
            !is_end
        };
        let running =
            ConsoleInput::start(console, Vec::new(), input, OverflowPolicy::Drop, filter).unwrap();

        keyboard.write_all(&vec![7; 3 * BACKLOG_CAPACITY]).unwrap();
        keyboard.write_all(&[1]).unwrap();

        while !found.recv_timeout(Duration::from_secs(10)).unwrap() {}
        // The thread ends although the guest has not read all bytes.
        drop(running);
    }

    #[test]
    fn dropping_the_input_ends_a_thread_that_waits_for_the_guest() {
        let (_port, console, input, mut keyboard) = setup();
        let running = start_waiting(console, Vec::new(), input);
        keyboard.write_all(&[7; 500]).unwrap();

        drop(running);

        assert!(keyboard.write_all(&[7]).is_err());
    }

    #[test]
    fn a_pipe_sink_forwards_all_bytes_and_closes_at_the_end() {
        let (console, mut device) = virtio_console();
        let (input, mut keyboard) = io::pipe().unwrap();
        let _running = start_waiting(console, Vec::new(), input);
        thread::spawn(move || keyboard.write_all(&long_input()).unwrap());

        let mut received = Vec::new();
        device.read_to_end(&mut received).unwrap();

        assert!(received == long_input());
    }

    #[test]
    fn input_that_one_vm_has_not_read_reaches_the_serial_port_of_the_next_one() {
        let ((port, _irq), console, input, mut keyboard) = setup();
        let running = start_waiting(console, Vec::new(), input.try_clone().unwrap());
        let writer = thread::spawn(move || keyboard.write_all(&long_input()).unwrap());
        let mut received = read_port(&port, 100);

        let unread = running.stop().unread();
        let ((port, _irq), console, ..) = setup();
        let _running = start_waiting(console, unread, input);
        received.extend(read_port(&port, long_input().len() - 100));

        writer.join().unwrap();
        assert!(received == long_input());
    }

    #[test]
    fn input_that_one_vm_has_not_read_reaches_the_virtio_console_of_the_next_one() {
        let (console, mut device) = virtio_console();
        let (input, mut keyboard) = io::pipe().unwrap();
        let running = start_waiting(console, Vec::new(), input.try_clone().unwrap());
        let writer = thread::spawn(move || keyboard.write_all(&long_input()).unwrap());
        let mut received = vec![0; 100];
        device.read_exact(&mut received).unwrap();
        drop(device);

        let unread = running.stop().unread();
        let (console, mut device) = virtio_console();
        let _running = start_waiting(console, unread, input);
        device.read_to_end(&mut received).unwrap();

        writer.join().unwrap();
        assert!(received == long_input());
    }

    #[test]
    fn input_of_a_closed_pipe_is_kept_for_the_next_vm() {
        let ((port, _irq), console, input, mut keyboard) = setup();
        keyboard.write_all(b"boot\n").unwrap();
        drop(keyboard);
        let running = start_waiting(console, Vec::new(), input);
        while port.lock().unread_input().len() < 5 {
            thread::yield_now();
        }

        assert_eq!(running.stop().unread(), b"boot\n");
    }
}
