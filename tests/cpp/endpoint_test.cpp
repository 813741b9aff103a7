#include <doctest/doctest.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/un.h>

#include "child_process.h"
#include "endpoint_fixture.h"
#include "fuzz_seeds.h"
#include "kvpool/net/connect/endpoint_state.h"
#include "kvpool/net/connect/handshake_messages.h"
#include "raw_peer.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST_CASE("an endpoint: two peers connect over every kind of address, and exchange messages") {
  for (const std::string& address :
       {fresh_name("unix:@"), fresh_name("unix:/tmp/"), std::string("tcp:127.0.0.1:0"), std::string("tcp:[::1]:0")}) {
    CAPTURE(address.c_str());
    Member server("server");
    Member client("client");
    const std::string at = server.endpoint->listen(address);
    const auto link = client.endpoint->connect(at, in_seconds(10));
    REQUIRE(server.admitted() == 1);
    CHECK(server.peers[0].name == "client");
    CHECK_FALSE(server.initiated[0]);
    CHECK(client.peers[0].name == "server");
    CHECK(client.initiated[0]);
    CHECK(link == client.links[0]);
    link->send(message_of(FrameKind::kCall, 5, some_bytes(100)));
    REQUIRE(soon([&] { return server.handlers[0]->message_count() == 1; }));
    server.links[0]->send(message_of(FrameKind::kAnswer, 5, some_bytes(200)));
    CHECK(link->drive(in_seconds(10), [&] { return client.handlers[0]->message_count() == 1; }));
  }
}

TEST_CASE("an endpoint: the process at the other end is known over a Unix socket, and not over TCP") {
  for (const bool unix : {true, false}) {
    Member server("server", {.secret = "sesame", .prefer_unix_socket = false});
    Member client("client");
    const auto link = client.endpoint->connect(server.endpoint->listen(unix ? fresh_name("unix:@") : "tcp:127.0.0.1:0"),
                                               in_seconds(10));
    CHECK(link->process() == (unix ? getpid() : 0));
    CHECK(server.links[0]->process() == (unix ? getpid() : 0));
  }
}

TEST_CASE("an endpoint: without a secret a Unix socket admits the same user, and TCP nobody") {
  Member server("server", {});
  Member client("client", {});
  const std::string at = server.endpoint->listen(fresh_name("unix:@"));
  CHECK(client.endpoint->connect(at, in_seconds(10)) != nullptr);
  for (const char* tcp : {"tcp:127.0.0.1:0", "tcp:127.0.0.1:1"}) {
    CHECK(error_of([&] { server.endpoint->listen(tcp); })->code() == ErrorCode::kArgument);
    CHECK(error_of([&] { client.endpoint->connect(tcp, in_seconds(1)); })->code() == ErrorCode::kArgument);
  }
  // A secret on one side only is a wrong secret.
  Member other("other");
  CHECK(error_of([&] { other.endpoint->connect(at, in_seconds(10)); })->code() == ErrorCode::kAuth);
  if (geteuid() != 0) return;
  const int status = test::run_in_child([&] {
    if (setresuid(65534, 65534, 65534) != 0) return test::kChildSkipped;
    if (!test::kChildMayStartThreads) return test::kChildSkipped;
    Member stranger("stranger", {});
    const auto error = error_of([&] { stranger.endpoint->connect(at, in_seconds(10)); });
    return error && error->code() == ErrorCode::kAuth ? 0 : 1;
  });
  CHECK((status == 0 || status == test::kChildSkipped));
}

TEST_CASE("an endpoint: the error for an invalid address shows valid ones") {
  Member member("member");
  for (const char* text : {"",
                           "tcp",
                           "tcp:",
                           "tcp:127.0.0.1",
                           "tcp:127.0.0.1:",
                           "tcp::80",
                           "tcp:127.0.0.1:65536",
                           "tcp:127.0.0.1:-1",
                           "tcp:127.0.0.1:8x",
                           "tcp:::1:80",
                           "tcp:[::1:80",
                           "tcp:[nonsense]:80",
                           "tcp:a b:80",
                           "udp:127.0.0.1:80",
                           "unix:",
                           "unix:@",
                           "unix:/",
                           "unix:relative",
                           "/tmp/x",
                           "127.0.0.1:80",
                           "unix:~/x"}) {
    CAPTURE(text);
    for (const bool listening : {true, false}) {
      const auto error = error_of([&] {
        listening ? static_cast<void>(member.endpoint->listen(text))
                  : static_cast<void>(member.endpoint->connect(text, in_seconds(1)));
      });
      REQUIRE(error);
      CHECK(error->code() == ErrorCode::kArgument);
      CHECK(std::string(error->what()).find("tcp:HOST:PORT") != std::string::npos);
    }
  }
  const auto long_path = error_of([&] { member.endpoint->listen("unix:/" + std::string(200, 'x')); });
  REQUIRE(long_path);
  CHECK(long_path->code() == ErrorCode::kArgument);
  CHECK(error_of([&] { member.endpoint->connect("tcp:*:80", in_seconds(1)); })->code() == ErrorCode::kArgument);
  CHECK(error_of([&] { member.endpoint->listen("tcp:192.0.2.1:0"); })->code() == ErrorCode::kArgument);
  CHECK(error_of([&] { member.endpoint->listen("unix:/nonexistent/socket"); })->code() == ErrorCode::kArgument);
  const auto unknown = error_of([&] { member.endpoint->connect("tcp:no-such-host.invalid:80", in_seconds(20)); });
  REQUIRE(unknown);
  CHECK((unknown->code() == ErrorCode::kArgument || unknown->code() == ErrorCode::kDeadline));
}

TEST_CASE("an endpoint: it listens at host names, and at all interfaces only if they are written out") {
  Member server("server");
  Member client("client");
  const std::string at = server.endpoint->listen("tcp:*:0");
  const std::string port = at.substr(at.rfind(':'));
  CHECK(at == "tcp:*" + port);
  CHECK(client.endpoint->connect("tcp:127.0.0.1" + port, in_seconds(10)) != nullptr);
  Member named("named");
  const std::string there = named.endpoint->listen("tcp:localhost:0");
  Member guest("guest");
  CHECK(guest.endpoint->connect(there, in_seconds(10)) != nullptr);
}

TEST_CASE("an endpoint: the socket file of a dead process is replaced, a live one's refused, the own one removed") {
  const std::string address = fresh_name("unix:/tmp/");
  const std::string path = address.substr(5);
  const auto exists = [&] {
    struct stat status{};
    return lstat(path.c_str(), &status) == 0;
  };
  {
    SockAddress dead{.tcp = false, .path = path, .host = {}, .port = 0};
    const Descriptor left = listen_at(dead);
  }
  CHECK(exists());
  {
    Member server("server");
    CHECK(server.endpoint->listen(address) == address);
    Member second("second");
    const auto error = error_of([&] { second.endpoint->listen(address); });
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kState);
    CHECK(second.endpoint->connect(address, in_seconds(10)) != nullptr);
  }
  CHECK_FALSE(exists());
  // Files that are no sockets are left alone, and so is one that replaced ours.
  const int file = open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
  REQUIRE(file >= 0);
  close(file);
  {
    Member server("server");
    CHECK(error_of([&] { server.endpoint->listen(address); })->code() == ErrorCode::kState);
    unlink(path.c_str());
    server.endpoint->listen(address);
    unlink(path.c_str());
    const int other = open(path.c_str(), O_CREAT | O_WRONLY | O_CLOEXEC, 0600);
    close(other);
  }
  CHECK(exists());
  unlink(path.c_str());
  Member first("first");
  const std::string at = first.endpoint->listen("tcp:127.0.0.1:0");
  Member second("second");
  CHECK(error_of([&] { second.endpoint->listen(at); })->code() == ErrorCode::kState);
}

TEST_CASE("an endpoint: peers on one host connect over a Unix socket, and may pass descriptors") {
  const int file = memfd_create("kvpool-test", MFD_CLOEXEC);
  REQUIRE(file >= 0);
  REQUIRE(write(file, "hello", 5) == 5);
  for (const std::string& address : {fresh_name("unix:@"), std::string("tcp:127.0.0.1:0")}) {
    CAPTURE(address.c_str());
    Member server("server");
    Member client("client");
    server.descriptors = {-1, file};
    client.descriptors = {file, -1, file, file};
    const auto link = client.endpoint->connect(server.endpoint->listen(address), in_seconds(10));
    CHECK(link->describe() == "unix");
    CHECK(server.admitted() == 1);
    CHECK(link->descriptor(0) == -1);
    CHECK(link->descriptor(2) == -1);
    CHECK(link->descriptor(9) == -1);
    char text[6] = {};
    CHECK(pread(link->descriptor(1), text, 5, 0) == 5);
    CHECK(std::string(text) == "hello");
    CHECK((fcntl(link->descriptor(1), F_GETFD) & FD_CLOEXEC) != 0);
    CHECK(server.links[0]->descriptor(0) >= 0);
    CHECK(server.links[0]->descriptor(1) == -1);
    CHECK(server.links[0]->descriptor(3) >= 0);
    // This process lives, so its pidfd is not readable.
    REQUIRE(link->pidfd() >= 0);
    pollfd gone{link->pidfd(), POLLIN, 0};
    CHECK(poll(&gone, 1, 0) == 0);
    CHECK((address.starts_with("tcp") ? !client.peers[0].local_socket.empty() : client.peers[0].local_socket.empty()));
  }
  close(file);
}

TEST_CASE("an endpoint: what the pool sends while it admits a peer arrives behind the metadata") {
  for (int round = 0; round < 20; ++round) {
    Member server("server");
    server.on_admit = [&](Link& link) {
      for (std::uint64_t i = 0; i < 5; ++i) link.send(message_of(FrameKind::kCall, i));
    };
    Member client("client");
    client.on_admit = server.on_admit;
    const auto link = client.endpoint->connect(server.endpoint->listen(fresh_name("unix:@")), in_seconds(10));
    REQUIRE(soon([&] { return client.handlers[0]->message_count() == 5 && server.handlers[0]->message_count() == 5; }));
    for (std::uint64_t i = 0; i < 5; ++i) CHECK(client.handlers[0]->messages[i].id == i);
  }
}

TEST_CASE("an endpoint: over a Unix socket to another user frames have a MAC, and no descriptors pass") {
  if (geteuid() != 0 || !test::kChildMayStartThreads) return;
  const int file = memfd_create("kvpool-test", MFD_CLOEXEC);
  Member server("server");
  server.descriptors = {file};
  server.on_admit = [](Link& link) { link.send(message_of(FrameKind::kCall, 1, some_bytes(1000))); };
  const std::string at = server.endpoint->listen(fresh_name("unix:@"));
  const int status = test::run_in_child([&] {
    if (setresuid(65534, 65534, 65534) != 0) return test::kChildSkipped;
    Member other("other");
    const auto link = other.endpoint->connect(at, in_seconds(10));
    if (link->descriptor(0) != -1) return 1;
    return link->drive(in_seconds(10), [&] { return other.handlers[0]->message_count() == 1; }) ? 0 : 2;
  });
  if (status == test::kChildSkipped) return;
  CHECK(status == 0);
  close(file);
}

TEST_CASE("an endpoint: handles of GPU memory are sent to processes of the same host, and never over a network") {
  for (const bool local : {true, false}) {
    const EndpointOptions options{.secret = "sesame", .prefer_unix_socket = local};
    Member server("server", options);
    Member client("client", options);
    for (Member* member : {&server, &client}) {
      MetadataMedium& hbm = member->metadata.media[Medium::kHbm];
      hbm = {2, 0, {{4096, 4096, 4096}}, MemoryKind::kGpu, {{4096, 8192, {std::byte{7}}}}};
    }
    const std::string address = server.endpoint->listen(local ? fresh_name("unix:@") : "tcp:127.0.0.1:0");
    client.endpoint->connect(address, in_seconds(10));
    REQUIRE(soon([&] { return server.admitted() == 1; }));
    for (Member* member : {&server, &client}) CHECK(has_handles(member->peers[0]) == local);
    // One that sends them all the same is not believed.
    const auto& link = dynamic_cast<SockLink&>(*server.links[0]);
    const Bytes body = write_metadata_body(client.metadata);
    if (local) {
      CHECK(has_handles(take_metadata(link, body)));
    } else {
      CHECK(error_of([&] { take_metadata(link, body); })->code() == ErrorCode::kProtocol);
    }
  }
}

TEST_CASE("an endpoint: a large metadata arrives whole") {
  Member server("server");
  Member client("client");
  for (Member* member : {&server, &client}) {
    MetadataMedium& medium = member->metadata.media[Medium::kDram];
    medium.blocks = 1;
    member->metadata.piece_bytes.assign(8000, 16);
    for (std::uint64_t i = 0; i < 8000; ++i) medium.segments.push_back({0x100000 + i * 64, 16, 16});
  }
  const auto link = client.endpoint->connect(server.endpoint->listen(fresh_name("unix:@")), in_seconds(10));
  CHECK(server.peers[0].media[Medium::kDram].segments.size() == 8000);
  CHECK(client.peers[0].media[Medium::kDram].segments[7999].address == 0x100000 + 7999 * 64);
}

TEST_CASE("an endpoint: on an older kernel the peer's process is known by its number") {
  if (!test::kChildMayStartThreads) return;
  const int status = test::run_in_child([] {
    if (!test::refuse_calls({{SYS_getsockopt, 2, 77, ENOPROTOOPT}})) return test::kChildSkipped;  // SO_PEERPIDFD
    Member server("server");
    Member client("client");
    const auto link = client.endpoint->connect(server.endpoint->listen(fresh_name("unix:@")), in_seconds(10));
    pollfd gone{link->pidfd(), POLLIN, 0};
    return link->pidfd() >= 0 && poll(&gone, 1, 0) == 0 ? 0 : 1;
  });
  CHECK((status == 0 || status == test::kChildSkipped));
}

TEST_CASE("an endpoint: a relay cannot connect a client on TCP to the server's Unix socket") {
  Member server("server");
  const std::string name = fresh_name("@");
  server.endpoint->listen("unix:" + name);
  SockAddress address = parse_address("tcp:127.0.0.1:0");
  const Descriptor listener = listen_at(address);
  std::thread between([&] {
    pollfd caller{listener.get(), POLLIN, 0};
    poll(&caller, 1, 10000);
    const Descriptor from = Descriptor::open([&] { return accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC); });
    const Descriptor to = dial(parse_address("unix:" + name), NoPatience());
    for (bool open = true; open;) {
      pollfd ends[2] = {{from.get(), POLLIN, 0}, {to.get(), POLLIN, 0}};
      poll(ends, 2, 10000);
      for (int i = 0; i < 2; ++i) {
        std::byte bytes[4096];
        if (ends[i].revents == 0) continue;
        const ssize_t got = recv(ends[i].fd, bytes, sizeof(bytes), 0);
        if (got <= 0) {
          open = false;
        } else {
          send_raw(i == 0 ? to : from, {bytes, static_cast<std::size_t>(got)});
        }
      }
    }
  });
  Member client("client");
  const auto error = error_of([&] { client.endpoint->connect(format_address(address), in_seconds(10)); });
  between.join();
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kProtocol);
  CHECK(server.admitted() == 0);
}
