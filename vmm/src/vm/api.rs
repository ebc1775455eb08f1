// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The control socket: HTTP/1.1 with JSON on a Unix socket, one request per connection.
//!
//! A thread reads [requests](super::api_request) and writes responses; the main thread executes the
//! requests. A client has 2 s for each read or write; clients are served one at a time.

use std::{
    fs::{self, File, TryLockError},
    io::{self, Read, Write},
    os::unix::{
        fs::{FileTypeExt as _, MetadataExt as _},
        net::{UnixListener, UnixStream},
    },
    path::{Path, PathBuf},
    sync::{Arc, mpsc},
    thread,
    time::{Duration, Instant},
};

use rustix::fs::{AtFlags, Gid, Mode, OFlags, Uid, chownat};
use vmm_sys_util::eventfd::EventFd;

use super::{
    api_request::{ApiRequest, Response, error_response, parse},
    privileges::Identity,
};
use crate::folder::folder_of;

/// Timeout of a client's request, and of each write to the client.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(2);

/// Attempts to lock the folder of a socket, and the time between them. Another run holds the lock for
/// microseconds, or some milliseconds if it has to wait for a CPU.
const LOCK_ATTEMPTS: u32 = 100;
const LOCK_RETRY_INTERVAL: Duration = Duration::from_millis(2);

/// A socket file, identified by device and inode, so that a replacement is not mistaken for it.
/// Dropping it removes the file.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    device: u64,
    inode: u64,
}

impl SocketFile {
    /// Removes the file, if it has not been replaced. A process that has changed its user may lack
    /// the permission; the next run then replaces the file.
    pub fn remove(&self) {
        if fs::symlink_metadata(&self.path).is_ok_and(|file| self.is(&file)) {
            let _ = fs::remove_file(&self.path);
        }
    }

    fn is(&self, file: &fs::Metadata) -> bool {
        (file.dev(), file.ino()) == (self.device, self.inode)
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        self.remove();
    }
}

/// A bound control socket without a server. Dropping it removes the file.
#[derive(Debug)]
pub struct BoundSocket {
    listener: UnixListener,
    file: Arc<SocketFile>,
}

impl BoundSocket {
    /// Binds a socket at `path`. Replaces a stale socket of a killed run.
    pub fn new(path: &Path) -> io::Result<Self> {
        // Another run must not mistake a socket for stale that does not listen yet, or replace it too.
        let _lock = lock_folder(path);
        let listener = match UnixListener::bind(path) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                let refuse = |why| Err(io::Error::new(error.kind(), why));
                if !fs::symlink_metadata(path)?.file_type().is_socket() {
                    return refuse("the file exists and is not a socket: use another path");
                }
                match UnixStream::connect(path) {
                    // The socket of a run that was killed.
                    Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                    Err(error) => return Err(error),
                    Ok(_) => {
                        return refuse("another VM listens on this socket: use another path");
                    }
                }
                fs::remove_file(path)?;
                UnixListener::bind(path)?
            }
            other => other?,
        };
        let file = fs::symlink_metadata(path)?;
        let (device, inode) = (file.dev(), file.ino());
        let file = Arc::new(SocketFile { path: path.to_owned(), device, inode });
        Ok(Self { listener, file })
    }

    /// Makes a user the owner of the file.
    ///
    /// # Errors
    /// The kernel refuses it, or another file has taken the place: it may be one of the system.
    pub fn set_owner(&self, identity: Identity) -> io::Result<()> {
        let Identity { user, group } = identity;
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = File::from(rustix::fs::open(&self.file.path, flags, Mode::empty())?);
        if !self.file.is(&file.metadata()?) {
            return Err(io::Error::other("another program has replaced the socket"));
        }
        let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
        Ok(chownat(&file, "", Some(user), Some(group), AtFlags::EMPTY_PATH)?)
    }
}

/// Locks the folder of a path against other runs that bind a socket in it. Goes on without a lock if a
/// VM holds it for long, which saves to this folder, or the folder cannot be read.
fn lock_folder(path: &Path) -> Option<File> {
    let folder = File::open(folder_of(path)).ok()?;
    for _ in 0..LOCK_ATTEMPTS {
        match folder.try_lock() {
            Ok(()) => return Some(folder),
            Err(TryLockError::WouldBlock) => thread::sleep(LOCK_RETRY_INTERVAL),
            Err(TryLockError::Error(_)) => break,
        }
    }
    None
}

/// A request that the main thread has not executed yet.
#[derive(Debug)]
pub struct PendingRequest {
    pub request: ApiRequest,
    response: mpsc::SyncSender<Response>,
}

impl PendingRequest {
    pub fn respond(self, response: Response) {
        // The client may have disconnected.
        let _ = self.response.send(response);
    }
}

/// Server of a control socket. Dropping it removes the file; its thread ends with the process.
#[derive(Debug)]
pub struct ApiServer {
    pub(super) file: Arc<SocketFile>,
    requests: mpsc::Receiver<PendingRequest>,
    /// Event signalled when a request is pending.
    pub(super) request_event: EventFd,
}

impl ApiServer {
    /// Starts the thread that serves `socket`. The thread calls `setup` first.
    pub fn serve(
        socket: BoundSocket,
        setup: impl FnOnce() -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let BoundSocket { listener, file } = socket;
        let request_event = EventFd::new(libc::EFD_NONBLOCK)?;
        let wake = request_event.try_clone()?;
        let (sender, requests) = mpsc::channel();
        let (ready, setup_result) = mpsc::sync_channel(1);
        thread::Builder::new().name("api".to_owned()).spawn(move || {
            let result = setup();
            let proceed = result.is_ok();
            if ready.send(result).is_ok() && proceed {
                serve_clients(&listener, &sender, &wake);
            }
        })?;
        setup_result.recv().map_err(io::Error::other)??;
        Ok(Self { file, requests, request_event })
    }

    /// Waits for a request.
    #[cfg(test)]
    pub fn wait_for_request(&self) -> PendingRequest {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            if let Some(pending) = self.next_request() {
                return pending;
            }
            assert!(Instant::now() < deadline, "no request arrives");
            thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn next_request(&self) -> Option<PendingRequest> {
        let request = self.requests.try_recv().or_else(|_| {
            // A request that arrives after this read signals the event again.
            let _ = self.request_event.read();
            self.requests.try_recv()
        });
        request.ok()
    }
}

fn serve_clients(listener: &UnixListener, to_main: &mpsc::Sender<PendingRequest>, wake: &EventFd) {
    for client in listener.incoming() {
        let Ok(client) = client else {
            // The error is most likely EMFILE, which may be temporary.
            thread::sleep(Duration::from_millis(100));
            continue;
        };
        if let Err(error) = serve_client(client, to_main, wake) {
            log::debug!("control socket: {error}");
        }
    }
}

fn serve_client(
    mut client: UnixStream,
    to_main: &mpsc::Sender<PendingRequest>,
    wake: &EventFd,
) -> io::Result<()> {
    client.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    let (status, body) = match read_request(&mut client)? {
        Err(response) => response,
        Ok(request) => {
            let (response, responses) = mpsc::sync_channel(1);
            let sent =
                to_main.send(PendingRequest { request, response }).is_ok() && wake.write(1).is_ok();
            match responses.recv() {
                Ok(response) if sent => response,
                _ => error_response(503, "the VM has stopped"),
            }
        }
    };
    let content_type = body.content_type();
    let body = body.into_text();
    write!(
        client,
        "HTTP/1.1 {status} {}\r\nContent-Type: {content_type}\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n{body}",
        reason_phrase(status),
        body.len(),
    )
}

const fn reason_phrase(status: u16) -> &'static str {
    match status {
        200 => "OK",
        404 => "Not Found",
        405 => "Method Not Allowed",
        409 => "Conflict",
        413 => "Content Too Large",
        500 => "Internal Server Error",
        503 => "Service Unavailable",
        _ => "Bad Request",
    }
}

/// Reads a request and discards its body. The time is that of all reads: others wait for this client.
fn read_request(client: &mut UnixStream) -> io::Result<Result<ApiRequest, Response>> {
    let mut bytes = Vec::new();
    let deadline = Instant::now() + CLIENT_TIMEOUT;
    loop {
        match parse(&bytes) {
            Ok(Some(request)) => return Ok(Ok(request)),
            Err(response) => return Ok(Err(response)),
            Ok(None) => {}
        }
        let rest = deadline.saturating_duration_since(Instant::now());
        if rest.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        client.set_read_timeout(Some(rest))?;
        let mut buffer = [0; 1024];
        match client.read(&mut buffer)? {
            0 => return Ok(Err(error_response(400, "the request is truncated"))),
            count => bytes.extend_from_slice(&buffer[..count]),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use serde_json::json;

    use super::*;
    use crate::devices::virtio::testing::wait_until;

    fn serve(path: &Path) -> io::Result<ApiServer> {
        ApiServer::serve(BoundSocket::new(path)?, || Ok(()))
    }

    /// Leaves the socket of a killed run. A program that another test starts listens, too, until it
    /// executes.
    fn leave_stale_socket(path: &Path) {
        drop(UnixListener::bind(path).unwrap());
        wait_until("the listener ends", || UnixStream::connect(path).is_err());
    }

    fn send(path: &Path, request: &str) -> String {
        let mut client = UnixStream::connect(path).unwrap();
        client.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        client.read_to_string(&mut response).unwrap();
        response
    }

    #[test]
    fn a_request_reaches_the_main_thread_and_its_response_the_client() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api");
        let api = serve(&path).unwrap();
        let (to, request) = (path.clone(), "POST /v1/pause HTTP/1.1\r\n\r\n");
        let client = thread::spawn(move || send(&to, request));

        let pending = api.wait_for_request();
        assert_eq!(pending.request, ApiRequest::Pause);
        pending.respond((200, json!({ "state": "paused" }).into()));

        let response = client.join().unwrap();
        assert!(response.starts_with("HTTP/1.1 200 OK\r\n"), "{response}");
        assert!(response.ends_with("\r\n\r\n{\"state\":\"paused\"}"), "{response}");
        drop(api);
        assert!(!path.exists());
    }

    #[test]
    fn a_socket_of_a_killed_run_is_replaced_and_a_served_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api");
        leave_stale_socket(&path);

        let api = serve(&path).unwrap();
        let second = serve(&path).unwrap_err();

        assert!(second.to_string().contains("another VM"), "{second}");
        drop(api);
        fs::write(&path, "other content").unwrap();
        assert!(serve(&path).is_err());
        assert_eq!(fs::read(&path).unwrap(), b"other content");
    }

    #[test]
    fn a_replaced_socket_file_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let (path, moved) = (folder.path().join("api"), folder.path().join("moved"));
        let first = serve(&path).unwrap();
        fs::rename(&path, &moved).unwrap();
        let second = serve(&path).unwrap();

        drop(first);

        assert!(path.exists());
        drop(second);
        assert!(!path.exists());
        drop(BoundSocket::new(&path).unwrap());
        assert!(!path.exists());
    }

    #[test]
    fn one_of_the_runs_that_start_at_once_has_the_socket() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api");
        for round in 0..300 {
            leave_stale_socket(&path);
            let start = Barrier::new(3);
            let bind = || {
                start.wait();
                BoundSocket::new(&path)
            };

            let bound = thread::scope(|scope| {
                let runs = [(); 3].map(|()| scope.spawn(bind));
                runs.map(|run| run.join().unwrap())
            });

            assert_eq!(bound.iter().filter(|bound| bound.is_ok()).count(), 1, "round {round}");
            assert!(UnixStream::connect(&path).is_ok(), "round {round}");
            drop(bound);
            assert!(!path.exists());
        }
    }

    #[test]
    fn a_file_in_place_of_the_socket_is_given_to_nobody() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("api");
        let socket = BoundSocket::new(&path).unwrap();
        let identity = Identity {
            user: rustix::process::getuid().as_raw(),
            group: rustix::process::getgid().as_raw(),
        };
        socket.set_owner(identity).unwrap();

        fs::remove_file(&path).unwrap();
        fs::write(&path, "of another program").unwrap();

        let error = socket.set_owner(identity).unwrap_err();
        assert!(error.to_string().contains("replaced"), "{error}");
    }
}
