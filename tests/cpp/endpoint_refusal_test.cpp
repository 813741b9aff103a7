// Endpoints that do not meet: what each side is told of why.
#include <doctest/doctest.h>

#include "endpoint_fixture.h"

using namespace kvpool;
using namespace kvpool::testing;

TEST_CASE("an endpoint: a wrong secret is an authentication error, and nobody is admitted") {
  for (const std::string& address : {fresh_name("unix:@"), std::string("tcp:127.0.0.1:0")}) {
    Member server("server");
    Member client("client", {.secret = "wrong"});
    const std::string at = server.endpoint->listen(address);
    const auto error = error_of([&] { client.endpoint->connect(at, in_seconds(10)); });
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kAuth);
    CHECK(server.admitted() == 0);
  }
}

TEST_CASE("an endpoint: the error with which one side refuses is thrown at the other, or closes its link") {
  for (const bool by_server : {true, false}) {
    CAPTURE(by_server);
    Member server("server");
    Member client("client");
    (by_server ? server : client).refuse.emplace(ErrorCode::kLayoutMismatch, "blocks of another shape");
    const std::string at = server.endpoint->listen("tcp:127.0.0.1:0");
    const auto error = error_of([&] { client.endpoint->connect(at, in_seconds(10)); });
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kLayoutMismatch);
    CHECK(std::string(error->what()) == "blocks of another shape");
    if (by_server) {
      CHECK(client.admitted() == 0);
    } else {
      REQUIRE(soon([&] { return server.admitted() == 1 && server.handlers[0]->closed_count() == 1; }));
      CHECK(server.handlers[0]->why()->code() == ErrorCode::kLayoutMismatch);
    }
  }
}

TEST_CASE("an endpoint: a refusal carries its numbers") {
  Member server("server");
  Member client("client");
  server.refuse.emplace(ErrorCode::kState, "known",
                        std::initializer_list<ErrorField>{{"incarnation", -5}, {"secret", 7}});
  const auto error =
      error_of([&] { client.endpoint->connect(server.endpoint->listen("tcp:127.0.0.1:0"), in_seconds(10)); });
  REQUIRE(error);
  REQUIRE(error->fields().size() == 1);  // unknown fields are left out
  CHECK(std::string(error->fields()[0].first) == "incarnation");
  CHECK(error->fields()[0].second == -5);
}

TEST_CASE("an endpoint: a refusal carries its cause, if peers may name that cause") {
  struct Try {
    ErrorCause said;
    ErrorCause heard;
    std::uint64_t subject;
  };
  constexpr std::uint64_t kSubject = UINT64_MAX - 3;
  for (const Try& each :
       {Try{ErrorCause::kConnectedAlready, ErrorCause::kConnectedAlready, kSubject},
        Try{ErrorCause::kInstanceTaken, ErrorCause::kInstanceTaken, kSubject},
        Try{ErrorCause::kDropped, ErrorCause::kDropped, kSubject}, Try{ErrorCause::kOther, ErrorCause::kOther, 0},
        Try{ErrorCause::kNobodyListens, ErrorCause::kOther, 0}, Try{ErrorCause::kUnanswered, ErrorCause::kOther, 0},
        Try{static_cast<ErrorCause>(200), ErrorCause::kOther, 0}}) {
    Member server("server");
    Member client("client");
    server.refuse = Error(ErrorCode::kState, "no").because(each.said, kSubject);
    const auto error =
        error_of([&] { client.endpoint->connect(server.endpoint->listen("tcp:127.0.0.1:0"), in_seconds(10)); });
    REQUIRE(error);
    CHECK(error->code() == ErrorCode::kState);
    CHECK(error->cause() == each.heard);
    CHECK(error->subject() == each.subject);
  }
}

TEST_CASE("an endpoint: the absence of a listener is told apart from other losses") {
  Member client("client");
  const auto error = error_of([&] { client.endpoint->connect(fresh_name("unix:@"), in_seconds(10)); });
  REQUIRE(error);
  CHECK(error->code() == ErrorCode::kPeerLost);
  CHECK(error->cause() == ErrorCause::kNobodyListens);
}
